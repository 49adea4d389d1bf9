"""Comparisons of a job on a cluster, checked against single simulations."""

import pytest
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.simulate.compute import memory_bytes
from megabatch.simulate.job import Job, job_of_model
from megabatch.simulate.load import load_cluster, preset_names
from megabatch.simulate.request import ModelSettings
from megabatch.simulate.scenario import simulate
from megabatch.simulate.step import AllReduceSettings, Overlap
from megabatch.simulate.whatif import (
    WORTH,
    changed_scenarios,
    changed_step,
    changes,
    compare,
    exposed_by_algorithm,
    ladder,
    least_exposed_s,
    losses,
    may_gain,
)
from megabatch.simulate.workload import load_workload
from tests.support.simulated import made_up_profile

AUTO = AllReduceSettings()
ALEXNET = load_workload("alexnet")  # few gradients, so choosing is fast


def job(
    cluster: str, batch: int | None = None, epochs: float | None = None, all_reduce: AllReduceSettings = AUTO
) -> Job:
    settings = ModelSettings(epochs=epochs)
    return job_of_model(ALEXNET, load_cluster(cluster), settings, all_reduce, batch, 1_281_167, 50_000)


def test_compare_lists_every_algorithm_that_applies_and_auto_last() -> None:
    cluster = load_cluster("dgx-a100")
    variants = compare(job("dgx-a100"), cluster, [1, 8, 12, 64])
    applying = {variant.label: [result.scenario.num_ranks for result in variant.results] for variant in variants}
    assert applying == {
        "ring": [8, 12, 64],
        "tree": [12, 64],
        "in_network": [12, 64],
        "flat": [8, 12, 64],
        "hierarchical": [8, 12, 64],
        "torus": [8, 64],
        "auto": [1, 8, 12, 64],
    }
    for num_ranks in (8, 12, 64):
        *alone, auto = [result.step.total_s for variant in variants for result in variant.results_at(num_ranks)]
        assert auto <= min(alone) * 1.002


def test_flat_without_rounding_is_not_listed_beside_the_ring() -> None:
    fp32 = replace(job("p40-roce100", 64), precision="fp32")
    assert [variant.label for variant in compare(fp32, load_cluster("p40-roce100"), [64])] == [
        "ring", "hierarchical", "torus", "auto",
    ]  # fmt: skip


def test_exposed_by_algorithm_equals_single_simulations() -> None:
    scenario = job("p40-roce100", 64).scenario(load_cluster("p40-roce100"), 64)
    found = exposed_by_algorithm(scenario)
    assert list(found.values()) == sorted(found.values())
    assert set(found) == {"ring", "flat", "hierarchical", "torus"}
    for algorithm, exposed_s in found.items():
        alone = replace(scenario, all_reduce=AllReduceSettings(algorithm=algorithm))
        assert simulate(alone).step.exposed_s == exposed_s


def test_a_profile_is_simulated_as_it_was_recorded() -> None:
    recorded = made_up_profile("alexnet", 224, 1000, (8, 16), (0.1, 0.2, 0.125), 10**6, 0.5)
    cluster = load_cluster("cpu-1gbe")
    profiled = job_of_model(ALEXNET, cluster, ModelSettings(), AUTO, None, 1000, 100, recorded)
    assert profiled.precision == "fp32" and profiled.batch_per_rank == 16
    simulated = simulate(profiled.scenario(cluster, 4))
    assert (simulated.step.forward_s, simulated.step.backward_s, simulated.step.update_s) == (1.6, 3.2, 0.5)
    assert sum(losses(simulated)) == pytest.approx(1) and ladder(profiled, cluster, [4])
    with pytest.raises(UserError, match=r"recorded with precision\.name=fp32.*precision\.name=fp16"):
        job_of_model(ALEXNET, cluster, ModelSettings(precision="fp16"), AUTO, 16, 1000, 100, recorded)
    with pytest.raises(UserError, match=r"recorded with data\.image_size=224"):
        job_of_model(ALEXNET, cluster, ModelSettings(image_size=192), AUTO, 16, 1000, 100, recorded)
    linked = replace(cluster, device=replace(cluster.device, curves={}))
    assert simulate(profiled.scenario(linked, 4)).step == simulated.step
    with pytest.raises(UserError, match="give it: --profile FILE"):
        job_of_model(ALEXNET, linked, ModelSettings(), AUTO, None, 1000, 100)


def test_slow_input_decides_the_step_and_the_best_change() -> None:
    cluster = load_cluster("p40-roce100", ["input.images_per_s=2000"])
    simulated = simulate(job("p40-roce100", 64).scenario(cluster, 16))
    assert simulated.images_per_s == pytest.approx(4000)
    lost = losses(simulated)
    assert lost.images > 0.5 and sum(lost) == pytest.approx(1)
    assert changes(simulated)[0].label == "images read twice as fast: input.images_per_s=4000"
    assert changes(simulated)[0].share == pytest.approx(1, rel=0.01)


def test_the_ladder_ends_with_half_the_bytes_and_never_computes_faster() -> None:
    variants = ladder(job("p40-roce100", 64), load_cluster("p40-roce100"), [64, 512])
    assert variants[0].label == "per-tensor ring" and len(variants) == 5
    for results in zip(*(variant.results for variant in variants), strict=True):
        steps = [result.step for result in results]
        assert {round(step.computing_s, 12) for step in steps} == {round(steps[0].computing_s, 12)}
        sizes = [sum(bucket.num_bytes for bucket in step.buckets) for step in steps]
        assert sizes[:4] == [4 * ALEXNET.num_parameters] * 4 and sizes[4] == 2 * ALEXNET.num_parameters
        assert len(steps[0].buckets) == 16  # one per tensor
        assert steps[-1].total_s < steps[0].total_s


def test_the_ladder_without_a_16_bit_curve_halves_only_the_bytes_sent() -> None:
    variants = ladder(job("hkbu-10gbe", 64), load_cluster("hkbu-10gbe"), [16])
    assert [variant.varied["precision"] for variant in variants] == ["fp32"] * 5
    assert [variant.varied["comm_dtype"] for variant in variants] == ["same"] * 4 + ["fp16"]
    assert variants[4].results[0].step.exposed_s < variants[3].results[0].step.exposed_s


def test_the_gain_of_a_change_equals_a_simulation_of_it() -> None:
    before = simulate(job("hkbu-10gbe", 64).scenario(load_cluster("hkbu-10gbe"), 16))
    found = {change.label: change for change in changes(before)}
    shares = [change.share for change in found.values()]
    assert shares == sorted(shares, reverse=True) and min(shares) > 0.005
    faster = load_cluster("hkbu-10gbe", ["network.gbps=20"])
    after = simulate(job("hkbu-10gbe", 64).scenario(faster, 16))
    change = found["twice the network: network.gbps=20"]
    assert change.gained == pytest.approx(after.images_per_s - before.images_per_s)
    assert change.share == pytest.approx(after.images_per_s / before.images_per_s - 1)
    assert "16 bits between nodes: --comm-dtype fp16" in found  # nothing is rounded so far
    assert not any("fused" in label for label in found)  # they are fused already


@pytest.mark.parametrize("overlap", ["auto", "none"])
def test_a_change_that_does_not_affect_all_reduces_keeps_the_plan(overlap: Overlap) -> None:
    cluster = load_cluster("p40-roce100", ["input.images_per_s=2000"])
    before = simulate(job("p40-roce100", 64, all_reduce=AllReduceSettings(overlap=overlap)).scenario(cluster, 64))
    changed = dict(changed_scenarios(before.scenario))
    assert len(changed) == 5 + (overlap == "none")
    for label, scenario in changed.items():
        assert changed_step(before, scenario) == simulate(scenario).step, label


@pytest.mark.parametrize("name", [name for name in preset_names() if not name.startswith("cpu-")])
@pytest.mark.parametrize("ranks", [1, 8, 64, 1024])
def test_a_change_that_is_skipped_would_gain_nothing(name: str, ranks: int) -> None:
    before = simulate(job(name, 64).scenario(load_cluster(name), ranks))
    assert least_exposed_s(before.scenario) <= before.step.exposed_s
    for label, scenario in changed_scenarios(before.scenario):
        step = simulate(scenario).step
        assert least_exposed_s(scenario) <= step.exposed_s * (1 + 1e-9)
        gain = scenario.global_batch / step.total_s / before.images_per_s - 1
        assert may_gain(before, scenario) or gain <= WORTH, label
        assert (label in [change.label for change in changes(before)]) == (gain > WORTH)


def test_overlap_is_proposed_if_there_is_none() -> None:
    all_reduce = AllReduceSettings(overlap="none")
    without = simulate(job("hkbu-10gbe", 64, all_reduce=all_reduce).scenario(load_cluster("hkbu-10gbe"), 16))
    assert any("fused" in change.label for change in changes(without))


@pytest.mark.parametrize("has_room", [False, True])
def test_twice_the_batch_is_accumulated_if_memory_is_short(has_room: bool) -> None:
    needed = memory_bytes(ALEXNET, "fp16", 128 if has_room else 127)
    cluster = load_cluster("p40-roce100", [f"device.memory_gb={needed / 1e9 + 1e-6}"])
    (doubled,) = (
        scenario
        for label, scenario in changed_scenarios(job("p40-roce100", 64).scenario(cluster, 8))
        if label == "twice the batch: 128 images per rank, 1,024 in all"
    )
    assert (doubled.batch_per_rank, doubled.accumulation) == (128, 1 if has_room else 2)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_losses_add_up_to_the_whole_step(ranks: int) -> None:
    simulated = simulate(job("p40-roce100", 64).scenario(load_cluster("p40-roce100"), ranks))
    lost = losses(simulated)
    assert sum(lost) == pytest.approx(1) and min(lost) >= 0
    assert lost.computing == pytest.approx(simulated.efficiency)


def test_without_latency_no_loss_is_due_to_it() -> None:
    still = ["node.alpha_us=0", "network.alpha_us=0", "engine.base_us=0"]
    lost = losses(simulate(job("p40-roce100", 64).scenario(load_cluster("p40-roce100", still), 64)))
    assert lost.latency == 0 and lost.carrying > 0


def test_the_ladder_needs_a_ring() -> None:
    with pytest.raises(UserError, match=r"--ladder .*engine\.sums=tree.*engine\.sums="):
        ladder(job("dgx-a100"), load_cluster("dgx-a100", ['engine.sums=["tree"]']), [64])
