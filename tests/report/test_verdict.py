"""The verdict names what took the time, and what to change."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from megabatch.report.verdict import findings_of, headline
from megabatch.report.view import RankDelays, RunView, excess_s, read_run
from megabatch.runs import files
from megabatch.runs.records import EvaluationRecord, Record, StepRecord, StepTimes, TimeBreakdown
from tests.support.made_up_run import made_up_records, make_run

STEP = StepTimes(data=0.001, forward=0.03, backward=0.06, comm=0.001, update=0.005)


def run_with(folder: Path, times: StepTimes, stage: str = "decode", evaluation_s: float = 0.01) -> RunView:
    """A run whose steps all take these times."""
    make_run(folder, steps=90, fp16=False)
    wall_s, records = 0.0, list[Record]()
    for record in made_up_records(90, fp16=False, evaluations=9):
        if isinstance(record, StepRecord):
            wall_s += times.total
            waits = TimeBreakdown(**{stage: times.data})
            records.append(replace(record, times=times, wall_s=wall_s, data_wait=waits, data_wait_s=times.data))
        else:
            wall_s += evaluation_s
            part = StepTimes(evaluation=evaluation_s)
            records.append(replace(record, times=part, wall_s=wall_s, rank_waits_s=[0.1, 0.1]))
    (folder / files.METRICS).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    (folder / files.SUMMARY).write_bytes(
        msgspec.json.encode({**msgspec.json.decode((folder / files.SUMMARY).read_bytes()), "wall_s": wall_s})
    )
    return read_run(folder)


@pytest.mark.parametrize(
    ("times", "stage", "title", "advice"),
    [
        ({"data": 0.05}, "decode", "Waiting for images", "megabatch pack /data/imagenet OUT --shorter-side 256"),
        ({"data": 0.05}, "read", "Waiting for images", "local disk"),
        ({"data": 0.05}, "augment", "Waiting for images", "run.decode_threads"),
        ({"data": 0.05}, "copy", "Waiting for images", "batch.micro"),
        ({"comm": 0.05}, "read", "Exposed communication", "comm.dtype=bf16"),
        ({"checkpoint": 0.05}, "read", "Checkpoints", "checkpoint.every_steps"),
        ({"other": 0.05}, "read", "Other work", "batch.global"),
        ({}, "read", "Compute", "nothing to gain from input or network"),
    ],
)
def test_what_took_the_time_comes_first_with_its_share_and_a_remedy(
    times: dict[str, float], stage: str, title: str, advice: str, tmp_path: Path
) -> None:
    view = run_with(tmp_path / "run", replace(STEP, **times), stage)
    findings = findings_of(view)
    assert findings[0].title == title and advice in findings[0].advice
    total = sum(view.times.totals().values())
    part = sum(seconds for key, seconds in view.times.totals().items() if key == stage or key in times)
    if times:
        assert findings[0].share == pytest.approx(part / total, rel=0.02)
    assert headline(view, findings).startswith(title)  # each takes a third of the time


def test_frequent_evaluations_are_told_how_rare_they_should_be(tmp_path: Path) -> None:
    view = run_with(tmp_path / "run", STEP, evaluation_s=0.4)
    (found,) = [found for found in findings_of(view) if found.title == "Evaluations"]
    assert found.share == pytest.approx(9 * 0.4 / view.wall_s)
    assert "train.evaluate_every" in found.advice


@pytest.mark.parametrize("status", ["failed", "diverged", "stopped", None])
def test_a_run_that_did_not_finish_says_so_first(status: str | None, tmp_path: Path) -> None:
    view = read_run(make_run(tmp_path / "run", steps=60, status=status))  # type: ignore[arg-type]
    first = findings_of(view)[0]
    assert first.title == f"It {'was ' if status in ('stopped', None) else ''}{status or 'killed'}"
    if status != "stopped":
        assert "Connection closed by peer" in first.advice
    assert (status or "killed") in headline(view, findings_of(view))


def test_a_loss_that_does_not_fall_is_a_problem(tmp_path: Path) -> None:
    view = read_run(make_run(tmp_path / "run", steps=100))
    assert "The loss does not fall" not in [found.title for found in findings_of(view)]
    for place in range(100):
        view.steps.of["loss"][place] = 6.9
    assert findings_of(view)[0].title == "The loss does not fall"


def evaluation(step: int, waits: list[float]) -> EvaluationRecord:
    return EvaluationRecord(
        top1=0.5,
        top5=0.9,
        test_loss=1.0,
        class_top1=[],
        samples_evaluated=1,
        wall_s=1.0,
        times=StepTimes(),
        step=step,
        epoch=1.0,
        rank_waits_s=waits,
    )


def test_who_waits_least_was_waited_for(tmp_path: Path) -> None:
    delays = RankDelays()
    delays.add_evaluation(evaluation(10, [5.0, 5.0, 1.0, 4.0]))
    delays.add_evaluation(evaluation(20, [3.0, 2.0, 1.0, 3.0]))
    first = delays.by_delay()[0]
    assert (first.rank, first.delay_s, first.wait_s, first.num_last) == (2, 6.0, 2.0, 2)
    assert [row.delay_s for row in delays.by_delay()] == [6.0, 1.0, 1.0, 0.0]
    assert excess_s(delays) == 5.0 and delays.num_steps == 20
    delays.add_evaluation(evaluation(30, [1.0, 2.0]))  # it has resumed on two ranks: those before are others
    assert (delays.num_ranks, delays.num_steps) == (2, 10)
    assert delays.by_delay()[0].rank == 0


def test_one_slow_rank_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, replace(STEP, comm=0.05))
    rows = (
        (folder / files.METRICS).read_bytes().replace(b'"rank_waits_s":[0.1,0.1]', b'"rank_waits_s":[0.4,0.4,0.4,0.02]')
    )
    (folder / files.METRICS).write_bytes(rows)
    titles = [found.title for found in findings_of(read_run(folder))]
    assert "Waiting for rank 3" in titles
