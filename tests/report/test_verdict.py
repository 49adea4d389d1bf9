"""The verdict names the bottleneck and the setting to change."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from megabatch.report.stragglers import rank_charts
from megabatch.report.verdict import findings_of, headline
from megabatch.report.view import RankDelays, RunView, excess_s, read_run
from megabatch.runs import files
from megabatch.runs.records import EvaluationRecord, GpuUse, Mistakes, Record, StepRecord, StepTimes, TimeBreakdown
from tests.support.made_up_run import made_up_records, make_run

STEP = StepTimes(data=0.001, forward=0.03, backward=0.06, comm=0.001, update=0.005)


def run_with(folder: Path, times: StepTimes, stage: str = "decode", evaluation_s: float = 0.01) -> RunView:
    """Return a run whose steps all take these times, and whose accuracy gives no finding."""
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
            records.append(replace(record, times=part, wall_s=wall_s, rank_waits_s=[0.1, 0.1], top1=0.7))
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
        ({}, "read", "Compute", "gain nothing"),
    ],
)
def test_largest_share_of_the_time_comes_first_with_a_remedy(
    times: dict[str, float], stage: str, title: str, advice: str, tmp_path: Path
) -> None:
    view = run_with(tmp_path / "run", replace(STEP, **times), stage)
    findings = findings_of(view)
    assert findings[0].title == title and advice in findings[0].advice
    total = sum(view.times.totals().values())
    part = sum(seconds for key, seconds in view.times.totals().items() if key == stage or key in times)
    if times:
        assert findings[0].share == pytest.approx(part / total, rel=0.02)
    assert f"in training). {title}" in headline(view, findings)  # each takes a third of the time


def test_frequent_evaluations_get_advice_on_their_interval(tmp_path: Path) -> None:
    view = run_with(tmp_path / "run", STEP, evaluation_s=0.4)
    (found,) = [found for found in findings_of(view) if found.title == "Evaluations"]
    assert found.share == pytest.approx(9 * 0.4 / view.wall_s)
    assert "train.evaluate_every" in found.advice


@pytest.mark.parametrize("status", ["failed", "diverged", "stopped", None])
def test_unfinished_run_is_the_first_finding(status: str | None, tmp_path: Path) -> None:
    view = read_run(make_run(tmp_path / "run", steps=60, status=status))  # type: ignore[arg-type]
    first = findings_of(view)[0]
    assert first.title == f"It {'was ' if status in ('stopped', None) else ''}{status or 'killed'}"
    if status != "stopped":
        assert "Connection closed by peer" in first.advice
    assert (status or "killed") in headline(view, findings_of(view))


def test_constant_loss_is_a_problem(tmp_path: Path) -> None:
    view = read_run(make_run(tmp_path / "run", steps=100))
    assert "The loss does not fall" not in [found.title for found in findings_of(view)]
    for place in range(100):
        view.steps.of["loss"][place] = 6.9
    assert findings_of(view)[0].title == "The loss does not fall"


@pytest.mark.parametrize(
    ("top1s", "training", "title", "advice"),
    [
        ([0.10, 0.11, 0.12, 0.14], 0.12, "It is near chance", "Always predicting the largest class would reach 10.0 %"),
        ([0.30, 0.50, 0.60, 0.62], 0.65, "It was still improving", "train.epochs=180"),
        ([0.30, 0.50, 0.70, 0.68], 0.72, "It fell from its best", "after step 45, with 70.0 %"),
        ([0.30, 0.50, 0.60, 0.605], 0.71, "It overfits", "data.augment"),
        ([0.20, 0.35, 0.40, 0.40], 0.45, "It underfits", "model.name"),
        ([0.30, 0.50, 0.60, 0.605], 0.65, None, ""),
        ([0.30, 0.50, 0.60, 0.605], None, None, ""),  # recorded without top-1 in training
    ],
)
def test_accuracy_is_explained(
    top1s: list[float], training: float | None, title: str | None, advice: str, tmp_path: Path
) -> None:
    """Evaluations follow a quarter, half, three quarters and the end of 60 steps."""
    make_run(tmp_path / "run", steps=60)
    results = iter(top1s)
    records = [
        replace(record, top1=training if isinstance(record, StepRecord) else next(results))
        for record in made_up_records(60, evaluations=4)
    ]
    (tmp_path / "run" / files.METRICS).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    view = read_run(tmp_path / "run")
    of_accuracy = [found for found in findings_of(view) if found.title.startswith("It ")]
    assert [found.title for found in of_accuracy] == ([title] if title else [])
    assert all(advice in found.advice for found in of_accuracy)
    in_training = f" ({100 * training:.0f} % in training)" if training else ""
    finding = f" {title}." if title else ""
    reached = f"It reached {100 * top1s[-1]:.1f} % top-1"
    assert headline(view, findings_of(view)).startswith(f"{reached}{in_training}.{finding}")


@pytest.mark.parametrize(("top1", "is_near"), [(0.72, True), (0.74, False)])
def test_chance_is_the_share_of_the_largest_class(top1: float, is_near: bool, tmp_path: Path) -> None:
    view = read_run(make_run(tmp_path / "run", steps=60))
    assert view.last_evaluation
    view.mistakes = Mistakes(class_counts=[70, 30], confusions=None)
    view.last_evaluation = replace(view.last_evaluation, top1=top1)
    assert ("It is near chance" in [found.title for found in findings_of(view)]) == is_near


def test_early_end_is_explained(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=60)
    summary = msgspec.json.decode((folder / files.SUMMARY).read_bytes())
    reason = "train.patience=5: top-1 was best after step 40 (--checkpoint best)"
    (folder / files.SUMMARY).write_bytes(msgspec.json.encode({**summary, "ended_early": reason}))
    first = findings_of(read_run(folder))[0]
    assert (first.title, first.advice) == ("It ended early, as its settings ask", f"{reason}.")


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


def test_rank_that_waits_least_is_the_straggler(tmp_path: Path) -> None:
    delays = RankDelays()
    delays.add_evaluation(evaluation(10, [5.0, 5.0, 1.0, 4.0]))
    delays.add_evaluation(evaluation(20, [3.0, 2.0, 1.0, 3.0]))
    first = delays.by_delay()[0]
    assert (first.rank, first.delay_s, first.wait_s, first.num_last) == (2, 6.0, 2.0, 2)
    assert [row.delay_s for row in delays.by_delay()] == [6.0, 1.0, 1.0, 0.0]
    assert excess_s(delays) == 5.0 and delays.num_steps == 20
    delays.add_evaluation(evaluation(30, [1.0, 2.0]))  # resumed on two ranks: earlier delays are dropped
    assert (delays.num_ranks, delays.num_steps) == (2, 10)
    assert delays.by_delay()[0].rank == 0


def test_slow_rank_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_with(folder, replace(STEP, comm=0.05))
    rows = (
        (folder / files.METRICS).read_bytes().replace(b'"rank_waits_s":[0.1,0.1]', b'"rank_waits_s":[0.4,0.4,0.4,0.02]')
    )
    (folder / files.METRICS).write_bytes(rows)
    titles = [found.title for found in findings_of(read_run(folder))]
    assert "Waiting for rank 3" in titles


def gpu(clock_mhz: float, xid_errors: int = 0, **slowed: float) -> GpuUse:
    return GpuUse(
        utilization=1.0,
        clock_mhz=clock_mhz,
        slowed={name.replace("_", " "): share for name, share in slowed.items()},  # type: ignore[misc]
        xid_errors=xid_errors,
    )


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (gpu(1410, power_cap=0.9), ""),  # as the others
        (gpu(1005, heat=0.8, power_cap=0.9), "throttled, by power cap 90 % of the time: 1,005 MHz, the others 1,410"),
        (gpu(1400, heat=0.2, power_cap=0.9), "throttled, by heat 20 % of the time. Check the cooling"),
        (gpu(1005), "throttled: 1,005 MHz, the others 1,410. Compare its clocks"),
        (gpu(1410, xid_errors=2), "reported 2 critical errors (Xid): see dmesg"),
        (None, ""),
    ],
)
def test_straggler_with_a_throttled_gpu_is_explained(tmp_path: Path, slow: GpuUse | None, cause: str) -> None:
    folder = tmp_path / "run"
    run_with(folder, replace(STEP, comm=0.05))
    gpus = msgspec.json.encode([gpu(1410, power_cap=0.9)] * 3 + [slow])
    of_ranks = b'"rank_waits_s":[0.4,0.4,0.4,0.02],"rank_gpus":' + gpus
    rows = (folder / files.METRICS).read_bytes().replace(b'"rank_waits_s":[0.1,0.1],"rank_gpus":[]', of_ranks)
    (folder / files.METRICS).write_bytes(rows)
    view = read_run(folder)
    (finding,) = (found for found in findings_of(view) if found.title == "Waiting for rank 3")
    assert cause in finding.advice and ("Check its host for other processes" in finding.advice) == (not cause)
    page = str(rank_charts(view))
    assert ("1,005 MHz" in page) == (slow is not None and slow.clock_mhz == 1005) and "power cap 90 %" in page
