"""One step: hidden and exposed communication, jitter, input."""

import random
import statistics
from itertools import pairwise

import pytest
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.planning.topology import ClusterShape
from megabatch.simulate.cluster import Jitter
from megabatch.simulate.compute import compute_by_curve
from megabatch.simulate.load import load_cluster, preset_names
from megabatch.simulate.step import AllReduceSettings, Compute, jitter_s, simulate_step, slowest_of
from megabatch.simulate.workload import load_workload

RESNET = load_workload("resnet50")


def compute(cluster_name: str, batch: int = 64, precision: str = "fp16") -> Compute:
    return compute_by_curve(RESNET, load_cluster(cluster_name), precision, batch)


@pytest.mark.parametrize("name", preset_names())
def test_one_rank_never_waits(name: str) -> None:
    cluster = load_cluster(name)
    alone = compute(name, precision=next(iter(cluster.device.curves)))
    step = simulate_step(alone, cluster, 1, AllReduceSettings())
    assert step.buckets == [] and step.exposed_s == 0 and step.jitter_s == 0
    assert step.total_s == pytest.approx(alone.total_s)


@pytest.mark.parametrize("name", ["dgx-a100", "hkbu-10gbe", "p40-roce100"])
@pytest.mark.parametrize("ranks", [16, 128, 1024])
def test_fused_buckets_expose_least(name: str, ranks: int) -> None:
    cluster = load_cluster(name)
    precision = next(iter(cluster.device.curves))
    of_overlap = {
        overlap: simulate_step(compute(name, precision=precision), cluster, ranks, AllReduceSettings(overlap=overlap))
        for overlap in ("none", "layer", "fused", "auto")
    }
    least_s = min(step.total_s for step in of_overlap.values())
    assert of_overlap["fused"].total_s <= least_s * 1.002  # fewest buckets within a thousandth of the end
    assert of_overlap["auto"] == of_overlap["fused"]
    assert len(of_overlap["none"].buckets) == 1 and len(of_overlap["layer"].buckets) == 161


def test_without_overlap_the_whole_all_reduce_is_exposed() -> None:
    cluster = load_cluster("dgx-a100")
    step = simulate_step(compute("dgx-a100"), cluster, 64, AllReduceSettings(overlap="none"))
    assert step.exposed_s == pytest.approx(step.all_reduce_s)


@pytest.mark.parametrize("name", preset_names())
def test_auto_is_at_least_as_good_as_any_forced_algorithm(name: str) -> None:
    cluster = load_cluster(name)
    precision = next(iter(cluster.device.curves))
    best = simulate_step(compute(name, precision=precision), cluster, 64, AllReduceSettings())
    for algorithm in ("flat", "hierarchical", "torus", *cluster.engine_sums):
        forced = simulate_step(compute(name, precision=precision), cluster, 64, AllReduceSettings(algorithm=algorithm))
        assert best.total_s <= forced.total_s * 1.002
        assert {bucket.plan.name.split("/")[0] for bucket in forced.buckets} <= {
            algorithm,
            "ring",
            "tree",
            "in_network",
        }


def test_a_faster_network_never_makes_a_step_longer() -> None:
    slow = load_cluster("hkbu-10gbe")
    times_s = [
        simulate_step(compute("hkbu-10gbe", precision="fp32"), cluster, 32, AllReduceSettings()).total_s
        for gbps in (1, 10, 40, 400)
        for cluster in [replace(slow, network=replace(slow.network, gbps=gbps))]
    ]
    assert all(later <= 1.002 * earlier for earlier, later in pairwise(times_s))


def test_only_the_last_backward_hides_communication() -> None:
    cluster = load_cluster("hkbu-10gbe")
    once, four = (
        compute("hkbu-10gbe", precision="fp32"),
        compute("hkbu-10gbe", precision="fp32")._replace(accumulation=4),
    )
    steps = [simulate_step(one, cluster, 32, AllReduceSettings()) for one in (once, four)]
    assert steps[0].exposed_s == pytest.approx(steps[1].exposed_s)
    assert steps[1].forward_s == pytest.approx(4 * steps[0].forward_s)


def test_a_step_waits_for_slow_input() -> None:
    cluster = load_cluster("dgx-a100", ["input.images_per_s=8000"])
    step = simulate_step(compute("dgx-a100"), cluster, 64, AllReduceSettings())
    assert step.total_s == pytest.approx(8 * 64 / 8000) and step.input_s > 0
    fast = simulate_step(
        compute("dgx-a100"), load_cluster("dgx-a100", ["input.images_per_s=80000"]), 64, AllReduceSettings()
    )
    assert fast.input_s == 0


def test_torus_needs_equal_nodes() -> None:
    with pytest.raises(UserError, match="different numbers of ranks"):
        simulate_step(compute("dgx-a100"), load_cluster("dgx-a100"), 20, AllReduceSettings(algorithm="torus"))
    assert simulate_step(compute("dgx-a100"), load_cluster("dgx-a100"), 20, AllReduceSettings()).buckets


def test_stalls_grow_with_ranks_and_noise_hardly_does() -> None:
    noise, stalls = Jitter(noise=0.003), Jitter(stalls_per_step=1e-4, stall_ms=7)
    nodes = {count: ClusterShape.regular(count, 8) for count in (1, 2, 8, 512)}
    assert jitter_s(noise, nodes[1], 0.1) == jitter_s(stalls, nodes[1], 0.1) == 0  # part of the device's speed
    assert jitter_s(noise, nodes[512], 0.1) < 3 * jitter_s(noise, nodes[8], 0.1)
    # While stalls are rare, their number is ranks times probability, and each has the mean length.
    assert jitter_s(stalls, nodes[2], 0.1) == pytest.approx(8e-4 * 7e-3, rel=1e-3)
    assert jitter_s(stalls, nodes[512], 0.1) > 30 * jitter_s(stalls, nodes[8], 0.1) / 2


@pytest.mark.parametrize("num_ranks", [2, 8, 64, 2048])
def test_slowest_of_is_the_expected_maximum(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    rounds = 200_000 // num_ranks
    drawn = statistics.fmean(max(draw.gauss(0, 1) for _ in range(num_ranks)) for _ in range(rounds))
    assert slowest_of(num_ranks) == pytest.approx(drawn, abs=0.12)
