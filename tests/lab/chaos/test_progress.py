from pathlib import Path

import pytest
from megabatch_lab.chaos.judge import Phase, Progress, Watch, phase_of
from msgspec.structs import replace

from megabatch.runs.records import EvaluationRecord, Record, StepTimes
from tests.support.records import step_record

STEP = step_record(5, epoch=1.0, loss=1.0)
EVALUATED = EvaluationRecord(
    step=5,
    epoch=1.0,
    top1=0.5,
    top5=1.0,
    test_loss=1.0,
    class_top1=[],
    samples_evaluated=4,
    wall_s=1.0,
    times=StepTimes(),
)


@pytest.mark.parametrize(
    ("progress", "starting", "writing", "phase"),
    [
        (Progress((), None), True, False, "start-up"),
        (Progress((0,), None), False, False, "start-up"),
        (Progress((0, 5), STEP), False, False, "start-up"),  # the row is of the previous attempt
        (Progress((0,), STEP), True, True, "start-up"),  # and so is the partial file
        (Progress((0,), STEP), False, False, "step"),
        (Progress((0,), STEP), False, True, "write"),
        (Progress((0,), replace(STEP, evaluated=True)), False, False, "evaluation"),
        (Progress((0, 4), EVALUATED), False, False, "step"),
        (Progress((0, 4), replace(EVALUATED, step=9)), False, False, "end"),
        (Progress((0, 4), replace(STEP, step=9, evaluated=True)), False, False, "evaluation"),
    ],
)
def test_phase_of_a_run(progress: Progress, starting: bool, writing: bool, phase: Phase) -> None:
    assert phase_of(progress, starting, writing, num_steps=9) == phase


def test_watch_starts_before_the_folder_exists(tmp_path: Path) -> None:
    from megabatch.runs.folder import RunFolder

    def write(record: Record) -> None:
        run.write(record)

    watch = Watch(tmp_path / "run")
    assert watch.look() == Progress((), None) and not watch.is_writing() and not watch.is_finished()
    with RunFolder(tmp_path / "run") as run:
        run.begin("", {}, step=0)
        assert watch.look() == Progress((0,), None)
        write(STEP)
        assert watch.look() == Progress((0,), STEP)
    with RunFolder(tmp_path / "run") as run:
        run.begin("", {}, step=3)
        assert watch.look() == Progress((0, 3), None)
    (tmp_path / "run/checkpoints/.writing-step-00000005-1").mkdir(parents=True)
    assert watch.is_writing()
