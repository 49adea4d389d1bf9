"""The best batch of a number of ranks, compared with an exhaustive search."""

from typing import Literal

import pytest
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.planning.epochs import EpochCurve
from megabatch.simulate.best_batch import Limits, Spans, best_batch, best_batches, candidate, choose, refine
from megabatch.simulate.job import job_of_model
from megabatch.simulate.load import load_cluster
from megabatch.simulate.request import ModelSettings
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import load_workload

CLUSTER = load_cluster("dgx-h100")
JOB = job_of_model(
    load_workload("alexnet"), CLUSTER, ModelSettings(epochs=90), AllReduceSettings(), 64, 1_281_167, 50_000
)
CURVE = EpochCurve(source="made up", fewest=30, critical=4000, misfit=0.05, smallest=256, largest=16_384)
SPANS = Spans(32, 128)


def test_best_batch_is_that_of_an_exhaustive_search() -> None:
    found = best_batch(JOB, CLUSTER, CURVE, SPANS, 16)
    assert found
    every = [candidate(JOB, CLUSTER, CURVE, 16, 16 * size, size) for size in range(32, 129, 4)]
    assert found.minutes <= 1.01 * min(each.minutes for each in every)
    assert found.low_minutes < found.minutes < found.high_minutes
    assert found.epochs == pytest.approx(CURVE.epochs(found.batch), rel=0.01)


def test_interval_of_minutes_holds_that_of_the_step() -> None:
    for curve in (CURVE, replace(CURVE, misfit=0.0)):
        found = candidate(JOB, CLUSTER, curve, 16, 1024, 64)
        simulated = found.simulated
        low, high = (bound_s / simulated.step.total_s for bound_s in (simulated.low_step_s, simulated.high_step_s))
        assert found.low_minutes <= found.minutes * low * (1 + 1e-9) < found.minutes
        assert found.high_minutes * (1 + 1e-9) >= found.minutes * high > found.minutes


def test_microbatch_divides_the_images_of_a_rank_within_the_spans() -> None:
    flat = replace(CURVE, critical=1e9)  # more images cost nothing
    found = best_batch(JOB, CLUSTER, flat, SPANS, 8)
    assert found
    scenario = found.simulated.scenario
    assert scenario.batch_per_rank > SPANS.high and SPANS.low <= scenario.microbatch <= SPANS.high
    assert found.batch == 8 * scenario.batch_per_rank <= flat.largest
    assert scenario.batch_per_rank % scenario.microbatch == 0


def test_more_ranks_take_larger_batches_and_fewer_images_each() -> None:
    found, beyond = best_batches(JOB, CLUSTER, CURVE, SPANS, [8, 64, 512, 1024])
    batches = [each.batch for each in found]
    images = [each.simulated.scenario.batch_per_rank for each in found]
    assert batches == sorted(batches) and images == sorted(images, reverse=True)
    assert beyond == [1024] and found[-1].simulated.scenario.num_ranks == 512
    fastest, cheapest = choose(found, Limits(), "time"), choose(found, Limits(), "cost")
    assert fastest and fastest.minutes == min(each.minutes for each in found) and cheapest is found[0]
    limit = 60 * found[1].minutes
    assert choose(found, Limits(seconds=limit), "cost") is found[1]
    assert choose(found, Limits(seconds=1.0), "cost") is None
    assert choose(found, Limits(usd=found[0].usd), "time") is found[0]


def test_refinement_finds_the_last_whole_node_within_the_limits() -> None:
    coarse, _ = best_batches(JOB, CLUSTER, CURVE, SPANS, [64, 128])
    every, _ = best_batches(JOB, CLUSTER, CURVE, SPANS, range(64, 129, 8))
    goals: list[tuple[Literal["cost", "time"], Limits]]
    goals = [("cost", Limits(seconds=60 * every[4].minutes)), ("time", Limits(usd=every[4].usd))]
    for goal, limits in goals:
        found = choose(refine(JOB, CLUSTER, CURVE, SPANS, coarse, limits, goal), limits, goal)
        expected = choose(every, limits, goal)
        assert found and expected and found.batch == expected.batch == every[4].batch
    assert refine(JOB, CLUSTER, CURVE, SPANS, coarse, Limits(seconds=1.0), "cost") == coarse


def test_batches_beyond_the_curve_or_the_memory_are_rejected() -> None:
    with pytest.raises(UserError, match=r"1,024 ranks .*32,768.*16,384.*nearest: --ranks 512"):
        best_batches(JOB, CLUSTER, CURVE, SPANS, [1024])
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_gb=1.0))
    with pytest.raises(UserError, match=r"32 images, .*has 1; .*another cluster"):
        best_batches(JOB, small, CURVE, SPANS, [8])
