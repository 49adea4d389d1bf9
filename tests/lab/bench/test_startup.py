import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megabatch_lab.bench import startup
from megabatch_lab.rehearsal import fake_cuda

from megabatch.errors import UserError


@pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))
def test_bench_startup_grows_only_by_a_few_bytes_per_rank(tmp_path: Path) -> None:
    """Run in a separate process, because the bench installs the fake CUDA."""
    path = tmp_path / "bench.json"
    command = [sys.executable, "-m", "megabatch", "bench", "startup", "--ranks", "8,16,512", "--rounds", "1"]
    result = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    one_node, few, many = json.loads(path.read_text())["rows"]
    assert (one_node["ranks"], few["ranks"], many["ranks"]) == (8, 16, 512)
    assert few["store_requests"] == many["store_requests"] < 10
    assert many["bytes"] - few["bytes"] < 40 * (512 - 16) + 2_000  # the chosen plans differ in length
    assert few["bytes_a_rank"] == many["bytes_a_rank"] == 32
    assert one_node["stats_per_node"] == few["stats_per_node"] == many["stats_per_node"] < 2 * startup.CLASSES
    assert one_node["launches_per_step"] <= 164 and few["launches_per_step"] == many["launches_per_step"] <= 181
    assert few["syncs_per_step"] == many["syncs_per_step"] == 0
    assert "bytes grow by" in result.stdout


@pytest.mark.parametrize(
    ("is_rocm", "has_gpu", "has_compiler", "needs"),
    [
        (True, False, True, r"a CPU or CUDA build of torch: this one is for ROCm"),
        (False, True, True, r"a machine without a GPU: hide it with CUDA_VISIBLE_DEVICES="),
        (False, False, False, r"g\+\+: install it"),
    ],
)
def test_bench_startup_without_fake_cuda_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, is_rocm: bool, has_gpu: bool, has_compiler: bool, needs: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0" if is_rocm else None)
    monkeypatch.setattr(fake_cuda, "HAS_GPU", has_gpu)
    monkeypatch.setattr(shutil, "which", lambda name: name if has_compiler else None)
    with pytest.raises(UserError, match=rf"^bench startup needs .*{needs}$"):
        startup.run([8], 1, None)


def test_numbers_of_ranks_are_multiples_of_a_node() -> None:
    assert startup.read_numbers("8,256,2048") == [8, 256, 2048]
    for wrong in ("", "8,", "12", "0", "-8", "many"):
        with pytest.raises(UserError, match="must be multiples of 8"):
            startup.read_numbers(wrong)


@pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))
def test_bench_launches_times_steps_beside_busy_decoders(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    command = [sys.executable, "-m", "megabatch", "bench", "launches", "--rounds", "1", "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    rows = {row["decoders"]: row for row in json.loads(path.read_text())["rows"]}
    assert [*rows] == ["idle", "threads", "process"] and rows["idle"]["images_per_s"] == 0
    assert all(rows[arm]["images_per_s"] > 0 and rows[arm]["step_ms"] > 0 for arm in ("threads", "process"))
