import msgspec
import pytest
import torch

from megabatch.runs.records import EvaluationRecord, StepRecord, StepTimes, Straggler, TimeBreakdown
from megabatch.runs.totals import RunTotals
from megabatch.training.step_metrics import microbatch_result, straggler_of


def step(number: int, images_per_s: float = 100.0) -> StepRecord:
    split = TimeBreakdown(read=0.01, decode=0.06, augment=0.02, copy=0.01)
    return StepRecord(
        step=number,
        epoch=number / 2,
        loss=1.0,
        lr=0.1,
        image_size=8,
        images_per_s=images_per_s,
        data_wait_s=0.1,
        comm_wait_s=0.2,
        straggler=5,
        straggler_delay_s=0.1 * number,
        loss_scale=2.0**number,
        skipped=number == 2,
        data_wait=split,
        skipped_images=[f"{number}.jpg"] * number,
        wall_s=1.0,
        times=StepTimes(),
    )


def evaluation(number: int, top1: float) -> EvaluationRecord:
    return EvaluationRecord(
        step=number,
        epoch=1,
        top1=top1,
        top5=0.9,
        test_loss=0.5,
        class_top1=[top1],
        samples_evaluated=20,
        device_mb=7e3,
        wall_s=1.0,
        times=StepTimes(),
    )


def test_summary_is_the_total_of_the_records() -> None:
    totals = RunTotals(global_batch=50, target_top1=0.5)
    totals.add(step(1, images_per_s=100.0), wall_s=1)
    totals.add(evaluation(1, 0.4), wall_s=2)
    totals.add(step(2, images_per_s=50.0), wall_s=3)
    totals.add(evaluation(2, 0.6), wall_s=4)
    totals = msgspec.json.decode(msgspec.json.encode(totals), type=RunTotals)  # through a checkpoint
    totals.add(evaluation(2, 0.55), wall_s=6)
    summary = totals.summary("finished")
    assert (summary.top1, summary.best_top1, summary.top5, summary.samples_evaluated) == (0.55, 0.6, 0.9, 20)
    assert (summary.steps, summary.wall_s, summary.status) == (2, 6, "finished")
    assert (summary.skipped_steps, summary.loss_scale) == (1, 4.0)
    assert summary.images_per_s == pytest.approx(100 / 1.5)
    assert summary.data_wait_share == pytest.approx(0.2 / 1.5)
    assert summary.data_wait is not None and summary.data_wait.decode == pytest.approx(0.12 / 1.5)
    assert summary.skipped_images == 2  # each once, though read repeatedly
    assert summary.comm_wait_share == pytest.approx(0.4 / 1.5)
    assert summary.straggler and summary.straggler.share == pytest.approx(0.4 / 1.5)
    assert summary.straggler == Straggler(rank=5, delay_s=0.2, share=summary.straggler.share)
    assert summary.time_to_target_s == 4  # the first that reached it, not the last
    assert summary.device_mb == 7e3


def test_training_top1_is_the_mean_over_the_epoch_of_the_last_evaluation() -> None:
    totals = RunTotals(global_batch=50, target_top1=None)
    for number, (epoch, top1) in enumerate([(0.5, 0.1), (1.0, 0.3), (1.5, 0.4), (2.0, 0.6)], 1):
        totals.add(msgspec.structs.replace(step(number, images_per_s=1.0), epoch=epoch, top1=top1), wall_s=number)
    assert totals.summary("stopped").training_top1 is None
    totals.add(evaluation(4, 0.4), wall_s=5)
    totals.add(msgspec.structs.replace(step(5, images_per_s=1.0), epoch=2.5, top1=0.9), wall_s=6)
    assert totals.summary("finished").training_top1 == pytest.approx(0.5)


def test_a_prediction_is_right_if_no_class_has_a_larger_target() -> None:
    logits, loss = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]), torch.tensor(2.5)
    for labels, right in (
        (torch.tensor([0, 2]), 1),
        (torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.7, 0.0]]), 2),  # mixtures
        (torch.tensor([[0.4, 0.6, 0.0], [0.3, 0.7, 0.0]]), 1),
        (torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), 1),  # several classes, and none
    ):
        assert microbatch_result(loss, logits, labels).tolist() == [2.5, right]
    assert microbatch_result(loss, logits[..., None], torch.tensor([0, 2]))[1].isnan()


def test_missing_target_or_evaluation_is_null() -> None:
    totals = RunTotals(global_batch=50, target_top1=None)
    assert totals.summary("failed").images_per_s is None
    totals.add(evaluation(1, 1.0), wall_s=2)
    assert totals.summary("stopped").time_to_target_s is None


@pytest.mark.parametrize(
    ("waits_s", "straggler", "least_s", "median_s"),
    [
        ([3.0, 0.5, 2.0, 4.0], 1, 0.5, 3.0),
        ([0.0, 0.25], 0, 0.0, 0.25),
        ([7.0], 0, 7.0, 7.0),
        ([4, 3, 1, 2, 9], 2, 1, 3.5),
    ],
)
def test_straggler_is_the_rank_that_waits_least(
    waits_s: list[float], straggler: int, least_s: float, median_s: float
) -> None:
    found = straggler_of(torch.tensor(waits_s, dtype=torch.float64))
    assert [number.item() for number in found] == [straggler, least_s, median_s]


def test_no_straggler_before_the_first_step() -> None:
    assert RunTotals(global_batch=1, target_top1=None).summary("stopped").straggler is None
