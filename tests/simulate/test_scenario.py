"""Whole training runs: intervals, time, interruptions, cost."""

import math

import pytest
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.simulate.cluster import Cluster, Faults, Price, Uncertainty
from megabatch.simulate.compute import (
    compute_by_curve,
    compute_by_profile,
    default_precision,
    memory_bytes,
    require_memory,
)
from megabatch.simulate.load import load_cluster, preset_names
from megabatch.simulate.scenario import RunLength, Scenario, Simulated, simulate, train_for
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import load_workload
from tests.support.simulated import made_up_profile

RESNET = load_workload("resnet50")


def run(cluster: Cluster, ranks: int, batch: int = 64, **settings: object) -> Simulated:
    return simulate(
        Scenario(
            workload=RESNET,
            cluster=cluster,
            num_ranks=ranks,
            batch_per_rank=batch,
            precision=default_precision(cluster),
            **settings,  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("ranks", [1, 8, 2048])
def test_a_prediction_is_inside_its_interval(name: str, ranks: int) -> None:
    found = run(load_cluster(name), ranks)
    assert 0 < found.low_images_per_s < found.images_per_s < found.high_images_per_s
    assert 0 < found.efficiency <= 1


def test_less_uncertainty_gives_a_smaller_interval() -> None:
    cluster = load_cluster("hkbu-10gbe")
    surer = replace(cluster, uncertainty=Uncertainty(bandwidth=1.01, latency=1.01, jitter=1.01))
    vague, sure = (run(one, 32, all_reduce=AllReduceSettings(overlap="none")) for one in (cluster, surer))
    assert vague.low_step_s < sure.low_step_s < sure.step.total_s < sure.high_step_s < vague.high_step_s


def test_the_ends_of_an_interval_are_steps_of_slower_and_faster_clusters() -> None:
    """If one input is uncertain, the interval is the step time at the ends of that input."""
    cluster = load_cluster("hkbu-10gbe")
    only_bandwidth = replace(cluster, uncertainty=Uncertainty(bandwidth=1.5))
    found = run(only_bandwidth, 32, all_reduce=AllReduceSettings(overlap="none"))
    slow = replace(
        cluster, network=replace(cluster.network, gbps=10 / 1.5), node=replace(cluster.node, gb_per_s=6.5 / 1.5)
    )
    slower_s = run(slow, 32, all_reduce=AllReduceSettings(overlap="none")).step.total_s
    device = found.scenario.compute.uncertainty
    later_s = math.hypot(slower_s - found.step.total_s, device * found.step.computing_s)
    assert found.high_step_s - found.step.total_s == pytest.approx(later_s, rel=1e-3)


def test_batches_outside_the_fitted_range_have_wide_intervals() -> None:
    """The points of an H100 have 50 to 816 images."""
    cluster = load_cluster("dgx-h100")
    results = [run(cluster, 8, batch) for batch in (4, 16, 64)]
    widths = [found.high_images_per_s / found.low_images_per_s for found in results]
    assert widths[0] > 1.4 > widths[1] > 1.25 > 1.2 > widths[2]


def test_steps_and_evaluations_add_up() -> None:
    length = RunLength(num_steps=1000, num_evaluations=10, test_images=50_000)
    found = run(load_cluster("dgx-a100"), 64, length=length)
    assert found.training
    assert found.training.steps_s == pytest.approx(1000 * found.step.total_s)
    # 782 images per rank, at the rate of forward passes.
    assert found.training.evaluation_s == pytest.approx(10 * 782 / (64 / found.step.forward_s))
    assert found.minutes == pytest.approx(found.training.total_s / 60)


def test_checkpoint_interval_of_young_and_daly_costs_least() -> None:
    faults = Faults(interruptions_per_rank_hour=2e-5, restart_minutes=5, checkpoint_s=30)
    cluster = replace(load_cluster("dgx-h100"), faults=faults)
    found = train_for(RunLength(num_steps=1), 54 * 86_400, 0.0, 16_384, cluster)
    hours_between = 1 / (2e-5 * 16_384)
    assert found.num_interruptions == pytest.approx(54 * 24 / hours_between)
    assert found.num_interruptions == pytest.approx(419, rel=0.02)  # the rate comes from Llama 3

    def overhead(interval_s: float) -> float:
        return 30 / interval_s + (interval_s / 2 + 300) / (3600 * hours_between)

    assert found.checkpoint_minutes
    chosen_s = 60 * found.checkpoint_minutes
    assert found.faults_s == pytest.approx(54 * 86_400 * overhead(chosen_s), rel=1e-3)
    assert overhead(chosen_s) <= min(overhead(0.9 * chosen_s), overhead(1.1 * chosen_s))


def test_cost_is_ranks_times_hours_times_price() -> None:
    cluster = replace(load_cluster("dgx-a100"), price=Price(usd_per_rank_hour=2.0), faults=Faults())
    found = train_for(RunLength(num_steps=3600), 3600.0, 0.0, 64, cluster)
    assert found.usd == pytest.approx(128)
    unpriced = train_for(RunLength(num_steps=3600), 1.0, 0.0, 64, replace(cluster, price=Price()))
    assert unpriced.usd is None


def test_a_profile_replaces_the_curve() -> None:
    profile = made_up_profile("small", 32, 10, (8, 16), (1e-3, 2e-3, 1e-3), 1000, 0.5)
    compute = compute_by_profile(profile, 16, accumulation=2)
    assert compute.total_s == pytest.approx(2 * (0.016 + 0.032) + 0.5)
    assert compute.backward.ready_s == [0.016]


def test_a_model_without_points_scales_with_its_flops() -> None:
    cluster, alexnet = load_cluster("dgx-a100"), load_workload("alexnet")
    times_s = [compute_by_curve(workload, cluster, "fp16", 1e6).total_s for workload in (RESNET, alexnet)]
    flops = [workload.forward_flops + workload.backward_flops for workload in (RESNET, alexnet)]
    assert times_s[0] / times_s[1] == pytest.approx(flops[0] / flops[1], rel=0.01)


def test_a_precision_without_a_curve_is_rejected() -> None:
    with pytest.raises(UserError, match=r"hkbu-10gbe .*only in fp32; nearest: precision.name=fp32"):
        compute_by_curve(RESNET, load_cluster("hkbu-10gbe"), "fp16", 64)


def test_memory_error_names_the_largest_batch_that_fits() -> None:
    cluster = load_cluster("p40-roce100")
    require_memory(RESNET, cluster, "fp16", 64)
    with pytest.raises(UserError, match=r"P40 has 24; nearest: (\d+) images") as raised:
        require_memory(RESNET, cluster, "fp16", 4096)
    largest = int(str(raised.value).split("nearest: ")[1].split(" ")[0])
    assert memory_bytes(RESNET, "fp16", largest) <= 24e9 < memory_bytes(RESNET, "fp16", largest + 1)
