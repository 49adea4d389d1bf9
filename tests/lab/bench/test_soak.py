import json
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from megabatch_lab.bench import soak
from megabatch_lab.bench.soak import read_stats, shared_memory_files
from typer.testing import CliRunner

from megabatch.cli.app import app

STEPS = 20_000
FLAT = {"memory_mb": 250.0, "threads": 9.0, "descriptors": 15.0, "shared_mb": 0.1}


def points_of(change: Callable[[int, dict[str, float]], float]) -> list[soak.SoakSample]:
    """Return 100 points of one rank; `change` alters the stats at a step and returns the steps per second."""
    points, seconds = [], 0.0
    for step in range(1, STEPS, STEPS // 100):
        stats = dict(FLAT)
        seconds += STEPS / 100 / change(step, stats)
        points.append(soak.SoakSample(step, seconds, 0.0, {("rank 0", name): value for name, value in stats.items()}))
    return points


def changed(change: Callable[[int, dict[str, float]], float]) -> list[str]:
    points = points_of(change)
    rows = [*soak.compare(points, STEPS), soak.compare_speed(points, STEPS)]
    assert [row["figure"] for row in rows] == [*FLAT, "steps_per_s"]
    return [row["figure"] for row in rows if not row["flat"]]


def test_run_that_only_warms_up_is_flat() -> None:
    def warm_up(step: int, stats: dict[str, float]) -> float:
        noise = math.sin(step)
        stats["memory_mb"] += noise - 100 * (step < STEPS / 10)
        stats["descriptors"] += step % 1000 == 1  # a checkpoint is being written
        stats["threads"] -= 2 * (step < STEPS / 10)
        return 200 + 20 * noise

    assert changed(warm_up) == []


@pytest.mark.parametrize("name,per_step", [("memory_mb", 3e-4), ("threads", 1e-3), ("descriptors", 1e-4)])
def test_growth_is_found(name: str, per_step: float) -> None:
    def grow(step: int, stats: dict[str, float]) -> float:
        stats[name] += int(per_step * step) if name != "memory_mb" else per_step * step
        return 200.0

    assert changed(grow) == [name]


def test_slower_run_is_found_and_faster_run_is_not() -> None:
    assert changed(lambda step, stats: 200 - 30 * step / STEPS) == ["steps_per_s"]
    assert changed(lambda step, stats: 200 + 30 * step / STEPS) == []


def test_stats_count_memory_and_descriptors_of_a_process() -> None:
    before = read_stats(os.getpid())
    memory = mmap.mmap(-1, 64_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not reused memory
    memory.write(b"x" * len(memory))
    name = f"torch_{os.getpid()}_soak"
    path = Path("/dev/shm", name)
    with path.open("wb"):
        held = read_stats(os.getpid())
        assert name in shared_memory_files({os.getpid()})
    path.unlink()
    assert name not in shared_memory_files({os.getpid()})
    assert held["descriptors"] == before["descriptors"] + 1
    assert held["memory_mb"] - before["memory_mb"] == pytest.approx(64, abs=8)


@pytest.mark.parametrize("leak,code", [(0.0, 0), (1.0, 1)])
def test_bench_soak_exits_with_1_after_growth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leak: float, code: int
) -> None:
    def grow(step: int, stats: dict[str, float]) -> float:
        stats["threads"] += leak * (step > STEPS / 2)
        return 200.0

    monkeypatch.setattr(soak, "watch", lambda folder, num_steps, num_ranks: (points_of(grow), set()))
    result = CliRunner().invoke(app, ["bench", "soak", "--json", str(tmp_path / "soak.json")])
    assert result.exit_code == code, result.output
    assert ("not flat: rank 0: threads" if code else "flat over 20,000 steps on 2 ranks") in result.output
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert [row["figure"] for row in rows if not row["flat"]] == ["threads"] * code
