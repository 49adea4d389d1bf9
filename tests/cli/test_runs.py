"""megabatch runs: a narrow terminal drops columns, not characters."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.cli.runs import COLUMNS, DROPPED, GAP, choose_columns
from megabatch.runs.folder import RunFolder
from megabatch.runs.reader import list_runs
from megabatch.runs.records import EvaluationRecord, StepTimes
from megabatch.runs.totals import RunTotals
from tests.support.records import step_record

DAY_S = time.mktime((2025, 11, 17, 12, 0, 0, 0, 0, -1))  # in the local time zone
LONGEST = "alexnet-bn-imagenet-16k"  # the longest name of a built-in recipe


def make_run(folder: Path, recipe: str, batch: int, finished: bool = True) -> None:
    totals = RunTotals(global_batch=batch, target_top1=None)
    evaluation = EvaluationRecord(
        step=2,
        epoch=1.0,
        top1=0.5,
        top5=0.9,
        test_loss=1.0,
        class_top1=[],
        samples_evaluated=4,
        wall_s=1.0,
        times=StepTimes(),
    )
    with RunFolder(folder) as run:
        run.begin(f'name = "{recipe}"\n[batch]\nglobal = {batch}\nmicro = 4\n', {}, step=0)
        for record in (step_record(2, epoch=1.0, loss=2.0), evaluation):
            totals.add(record, wall_s=1.0)
            run.write(record)
        if finished:
            run.finish(totals.summary("finished"))
    os.utime(folder / ("summary.json" if finished else "metrics.jsonl"), (DAY_S, DAY_S))


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path(f"runs/{LONGEST}-001"), LONGEST, 16_384)
    make_run(Path("runs/mine"), "photos", 64, finished=False)
    Path("runs/mine/half").mkdir()


def lines_at(width: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setenv("COLUMNS", str(width))
    text = CliRunner().invoke(app, ["runs"], catch_exceptions=False).output
    assert all(len(line) <= width for line in text.splitlines())
    return [line.split() for line in text.splitlines()]


@pytest.mark.usefixtures("inside")
def test_80_columns_show_recipe_batch_accuracy_and_date(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_at(80, monkeypatch) == [
        ["run", "recipe", "batch", "top-1", "date"],
        [f"{LONGEST}-001", LONGEST, "16,384", "0.5000", "2025-11-17"],
        ["mine", "photos", "64", "-", "2025-11-17"],
    ]


@pytest.mark.usefixtures("inside")
def test_wider_terminals_show_more_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_at(90, monkeypatch)[0] == ["run", "status", "recipe", "batch", "top-1", "date"]
    header, first, second = lines_at(200, monkeypatch)
    assert header == list(COLUMNS)
    assert first[:7] == [f"runs/{LONGEST}-001", "finished", LONGEST, "16,384", "0.5000", "2025-11-17", "12:00"]
    assert second[:4] == ["runs/mine", "killed", "photos", "64"]


@pytest.mark.usefixtures("inside")
def test_the_name_of_a_run_is_whole_on_the_narrowest_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = CliRunner().invoke(app, ["runs"]).output
    assert [line.split() for line in text.splitlines()][1] == [f"{LONGEST}-001", "0.5000"]


@given(widths=st.lists(st.integers(1, 40), min_size=len(COLUMNS), max_size=len(COLUMNS)), width=st.integers(1, 300))
def test_columns_are_dropped_in_order_and_only_as_needed(widths: list[int], width: int) -> None:
    by_name = dict(zip(COLUMNS, widths, strict=True))
    chosen = choose_columns(by_name, width)
    dropped = [column for column in DROPPED if column not in chosen]
    assert dropped == list(DROPPED[: len(dropped)]) and [c for c in COLUMNS if c in chosen] == chosen

    def needed(columns: list[str]) -> int:
        return sum(by_name[column] for column in columns) + GAP * (len(columns) - 1)

    assert needed(chosen) <= width or chosen == ["run", "top-1"]
    if dropped:
        assert needed([*chosen, dropped[-1]]) > width


def test_runs_with_unreadable_recipes_are_listed(tmp_path: Path) -> None:
    for name, text in (("a", "no = toml ="), ("b", "name = 3\nbatch = 4\n"), ("c", ""), ("d", "\xff")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_bytes(text.encode("latin-1"))
    assert [(run.path.name, run.recipe, run.batch) for run in list_runs(tmp_path)] == [
        (name, None, None) for name in "abcd"
    ]


@pytest.mark.usefixtures("inside")
def test_runs_are_listed_without_torch() -> None:
    code = (
        "import sys; from megabatch.cli.app import app\n"
        "try: app(['runs'], prog_name='megabatch')\n"
        "finally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and LONGEST in result.stdout, result.stderr
