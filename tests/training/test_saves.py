"""Saves in the background of steps: a kill, a full disk or a NaN during a save, and its report."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megabatch.config.schema import CheckpointSettings
from megabatch.data.catalog import load_data_set
from megabatch.errors import NotSaved
from megabatch.ranks.world import World
from megabatch.runs.reader import read_records, read_summary
from megabatch.runs.records import EvaluationRecord, Record
from megabatch.runs.totals import RunTotals
from megabatch.training.build import Overrides
from megabatch.training.checkpoint.format import newest_valid, read_description, read_state
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.checkpoint.save import Checkpoints
from megabatch.training.parts import Training
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record
from tests.support.file_limits import limit_file_size
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run

SHORT = ("precision.name=fp32", "batch.global=24", "train.epochs=2")  # 16 steps, evaluated after 8 and 16
NEVER = "checkpoint.every_steps=1000000"
EVERY_STEP = (
    "checkpoint.every_steps=1",
    "checkpoint.keep=3",
)  # more than two: none is skipped
Observe = Callable[[Record, Training], None]


class Watched(nn.Sequential):
    """A network with a buffer that does not affect its output."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 12 * 12, 6))
        self.register_buffer("seen", torch.zeros(2))


def record(
    world: World, folder: str, overrides: tuple[str, ...] = (), observe: Observe | None = None, stop_after: int = 0
) -> dict[str, Any]:
    """Run on synthetic images; return its output and how it ended."""
    config = small_run(*SHORT, *overrides, f"run.dir={folder}")
    taken: list[int] = []

    def stop() -> bool:
        taken.append(1)
        return len(taken) == stop_after

    torch.manual_seed(1)
    training = ready_to_train(config, load_data_set(config.data), world, Overrides(Watched()), stop_requested=stop)
    observed = (lambda record: observe(record, training)) if observe else None
    error = None
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr("megabatch.runs.folder.FIRST_PAUSE_S", 0.0)  # a failed write is retried at the next step
        try:
            train_and_record(config, decide_start(config, "auto", world), training, observe=observed)
        except NotSaved as caught:
            error = str(caught)
        finally:
            limit_file_size(-1)
    assert not any(thread.name == "checkpoints" for thread in threading.enumerate())
    lines = said.getvalue().splitlines()
    begun = next((number for number, line in enumerate(lines) if line.startswith("folder")), 0)
    told = [line for line in lines[begun:] if line.startswith(("warning", "saved")) and "TensorBoard" not in line]
    return {"error": error, "told": told, "lines": lines}


def is_step(record: Record, step: int) -> bool:
    return record.step == step and not isinstance(record, EvaluationRecord)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def require_same_run(one: Path, other: Path) -> None:
    """Assert that two runs are bitwise identical, including rows, without partial files."""
    for name in ("model.safetensors", "checkpoints/last/state.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    ours, theirs = ([(row.step, getattr(row, "loss", None)) for row in read_records(path)] for path in (one, other))
    assert ours == theirs and len(ours) == 18
    assert not list(one.rglob(".writing-*"))


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = ranks.run(record, str(folder), num_ranks=1)[0]
    assert result["error"] is None and not result["told"]
    return folder


def test_saves_and_their_cost_are_counted_and_shown(ranks: RankPool, tmp_path: Path) -> None:
    settings = ("checkpoint.every_steps=3", "checkpoint.keep=3")  # more than two: none is skipped
    lines = ranks.run(record, str(tmp_path), settings, num_ranks=1)[0]["lines"]
    summary = read_summary(tmp_path)
    assert summary and summary.saves
    evaluated = [row for row in read_records(tmp_path) if isinstance(row, EvaluationRecord)]
    best = [row.step for row in evaluated if all(row.top1 > other.top1 for other in evaluated if other.step < row.step)]
    expected = {3, 6, 9, 12, 15, 16, *best}
    assert len(evaluated) == 2 and (summary.saves.count, summary.saves.failed) == (len(expected), 0)
    assert 0 < summary.saves.longest_stall_s <= summary.saves.stall_s
    said = [line for line in lines if line.startswith("saves ")]
    assert len(said) == 1 and said[0].startswith(f"saves     {len(expected)} checkpoints; training stalled ")
    assert {"step-00000015", "step-00000016", "last", "best"} <= set(names(tmp_path))
    description = read_description(tmp_path / "checkpoints/last")
    assert description.step == 16 and description.totals.saves.count >= 5  # a resumed run adds to the count


class Paused:
    """A disk that writes nothing until its gate is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def wait(self) -> None:
        assert self.gate.wait(timeout=30)


def save_while_paused(world: World, folder: str) -> list[list[bool]]:
    """Return whether a save is due before a save, during its write and after it, by cost and by steps."""
    config = small_run(*SHORT)
    training = ready_to_train(config, load_data_set(config.data), world)
    due = []
    for number, settings in enumerate([CheckpointSettings(), CheckpointSettings(every_steps=2)]):
        disk = Paused()
        checkpoints = Checkpoints(Path(folder) / str(number), settings, 0, sync_rows=disk.wait)
        due.append([checkpoints.is_due(2)])
        before = training.master_weights.state_dict()
        name, weight = next(iter(before.items()))
        expected = weight.clone()
        checkpoints.save(training, RunTotals(global_batch=24, target_top1=None, steps=2))  # returns at once
        with torch.no_grad():
            weight.add_(1)  # like the next step
        due[-1].append(checkpoints.is_due(4))
        assert not checkpoints.folder.exists()
        disk.gate.set()
        checkpoints.drain()
        checkpoints.saving_took_s = 1e-9
        due[-1].append(checkpoints.is_due(4))
        assert torch.equal(read_state(checkpoints.folder / "last")[f"model.{name}"], expected)
        checkpoints.close()
    return due


def test_a_step_during_a_write_does_not_wait_and_does_not_change_the_save(ranks: RankPool, tmp_path: Path) -> None:
    by_cost, by_steps = ranks.run(save_while_paused, str(tmp_path), num_ranks=1)[0]
    assert by_cost == [True, False, True]  # the next save waits until this one is written
    assert by_steps == [True, True, True]  # a requested save is not skipped


def crash_states(world: World, folder: str) -> int:
    """Save twice; copy the folder at every sync and rename, as a kill at that moment would leave it."""
    config = small_run(*SHORT)
    training = ready_to_train(config, load_data_set(config.data), world)
    checkpoints = Checkpoints(Path(folder) / "run", CheckpointSettings(keep=1), 0)
    sync, rename, rmtree, taken = os.fsync, Path.rename, shutil.rmtree, list[int]()

    def crash() -> None:
        taken.append(1)
        if (Path(folder) / "run").exists():
            shutil.copytree(Path(folder) / "run", Path(folder) / f"crash-{len(taken)}", symlinks=True)

    def crash_and(function: Callable[..., Any]) -> Callable[..., Any]:
        def crashing(*given: Any, **named: Any) -> Any:
            crash()
            result = function(*given, **named)
            crash()
            return result

        return crashing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", crash_and(sync))
        patch.setattr(Path, "rename", crash_and(rename))
        for step in (1, 2):
            checkpoints.save(training, RunTotals(global_batch=24, target_top1=None, steps=step, best_step=1))
            checkpoints.drain()
            if step == 1:
                taken.clear()
                for path in Path(folder).glob("crash-*"):
                    rmtree(path)
    checkpoints.close()
    return len(taken)


def test_a_kill_during_a_write_leaves_the_previous_or_the_whole_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    num_crashes = ranks.run(crash_states, str(tmp_path), num_ranks=1)[0]
    found: list[str] = []
    for number in range(1, num_crashes + 1):
        run, reports = tmp_path / f"crash-{number}", list[str]()
        newest = newest_valid(run, reports.append)
        assert newest is not None and not reports
        assert read_description(run / "checkpoints/last").step in (1, 2)
        assert read_description(run / "checkpoints/best").step == 1
        found.append(newest.name)
        Checkpoints(run, CheckpointSettings(keep=1), first_step=int(newest.name[-8:]))  # resumes
        assert not list(run.rglob(".writing-*"))
    assert sorted(set(found)) == ["step-00000001", "step-00000002"] and found == sorted(found)


def full_from_3_to_10(record: Record, training: Training) -> None:
    if is_step(record, 3):
        limit_file_size(700)  # a row or two, and no checkpoint
    if is_step(record, 10):
        limit_file_size(-1)


def test_a_temporarily_full_disk_is_reported_once_and_changes_nothing(
    ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    result = ranks.run(record, str(tmp_path), EVERY_STEP, full_from_3_to_10, num_ranks=1)[0]
    assert result["error"] is None
    failed, saved = result["told"][::2], result["told"][1::2]
    # Once; twice if a checkpoint was being written when there was room for rows again.
    assert len(failed) == len(saved) in (1, 2) and set(saved) == {"saved     all pending data is written"}
    for line in failed:
        assert "File too large; training continues and retries; raise the limit on the file size" in line
    require_same_run(tmp_path, whole)
    summary = read_summary(tmp_path)
    assert summary and summary.status == "finished" and summary.saves and summary.saves.failed > 0
    assert (tmp_path / "checkpoints/best").exists()


def remove_after_5(record: Record, training: Training) -> None:
    while is_step(record, 5) and Path(os.environ["REMOVED"]).exists():  # a checkpoint may be in progress there
        shutil.rmtree(os.environ["REMOVED"], ignore_errors=True)


def removed_under_it(world: World, folder: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMOVED", folder)
        return record(world, folder, ("checkpoint.every_steps=3",), remove_after_5)


def test_a_run_whose_folder_is_removed_ends_with_the_same_result(ranks: RankPool, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = ranks.run(removed_under_it, str(folder), num_ranks=1)[0]
    assert result["error"] is None
    assert sum("was removed during the run; it was created again" in line for line in result["told"]) == 1
    require_same_run(folder, whole)
    assert {path.name for path in whole.iterdir()} - {path.name for path in folder.iterdir()} <= {
        path.name for path in whole.glob("events.out*")
    }


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs root and mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_run_whose_result_does_not_fit_on_the_disk_fails_and_resumes_once_it_fits(
    ranks: RankPool, whole: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 256):
        folder, filler = tmp_path / "disk/run", tmp_path / "disk/filler"
        stopped = ranks.run(record, str(folder), (NEVER,), None, 4, num_ranks=1)[0]
        assert stopped["error"] is None and names(folder) == ["last", "step-00000004"]
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (4096, 1):
                while file.write(bytes(size)):
                    pass
        failed = ranks.run(record, str(folder), (NEVER,), num_ranks=1)[0]
        assert failed["error"] and "No space left on device; free some space" in failed["error"]
        assert "\n" not in failed["error"] and names(folder) == ["last", "step-00000004"]
        assert not list(folder.rglob(".writing-*"))
        filler.unlink()
        again = ranks.run(record, str(folder), (NEVER,), num_ranks=1)[0]
        assert again["error"] is None
        require_same_run(folder, whole)


def spoil_from_6(record: Record, training: Training) -> None:
    if is_step(record, 6):
        training.model.module.seen.fill_(torch.nan)


def spoil_6_to_12(record: Record, training: Training) -> None:
    spoil_from_6(record, training)
    if is_step(record, 12):
        training.model.module.seen.zero_()


def test_a_buffer_with_nan_is_reported_at_the_first_save_and_fails_the_run_at_the_end(
    ranks: RankPool, tmp_path: Path
) -> None:
    result = ranks.run(record, str(tmp_path), EVERY_STEP, spoil_from_6, num_ranks=1)[0]
    (told,) = result["told"]
    assert told.startswith("warning   the model's seen has inf or NaN at step 7, so no checkpoint is written")
    assert "the last checkpoint is at step 6." in told
    assert result["error"] == (
        "step 16 could not be saved: the model's seen has inf or NaN at step 16; the last checkpoint is at "
        "step 6; fix the cause and start the run again"
    )
    assert set(names(tmp_path)) == {"last", "step-00000004", "step-00000005", "step-00000006"}
    summary = read_summary(tmp_path)
    assert summary and summary.status == "failed"


def test_a_buffer_that_is_finite_again_is_saved_again(ranks: RankPool, whole: Path, tmp_path: Path) -> None:
    result = ranks.run(record, str(tmp_path), EVERY_STEP, spoil_6_to_12, num_ranks=1)[0]
    assert result["error"] is None and result["told"][1:] == ["saved     all pending data is written"]
    require_same_run(tmp_path, whole)


def resume_and_count(world: World, folder: str) -> int:
    """Return how often this rank opened a checkpoint's tensors."""
    opened: list[str] = []
    is_counting = [True]

    def hear(event: str, given: tuple[Any, ...]) -> None:
        is_written = ".writing-" in str(given[0]) if given else False
        if is_counting and event == "open" and str(given[0]).endswith("state.safetensors") and not is_written:
            opened.append(str(given[0]))

    sys.addaudithook(hear)
    record(world, folder)
    is_counting.clear()
    return len(opened)


def test_only_rank_0_reads_a_checkpoint_and_only_once(ranks: RankPool, tmp_path: Path) -> None:
    if ranks.size < 2:
        pytest.skip("needs 2 ranks")
    ranks.run(record, str(tmp_path), (), None, 4, num_ranks=2)
    assert ranks.run(resume_and_count, str(tmp_path), num_ranks=2) == [1, 0]
    summary = read_summary(tmp_path)
    assert summary and summary.resumed_from_step and summary.status == "finished"
