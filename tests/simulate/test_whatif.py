"""Questions about a job on a cluster, beside what the simulator says of each case alone."""

import pytest
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.simulate.compute import memory_bytes
from megabatch.simulate.job import Job, job_of_model
from megabatch.simulate.load import load_cluster
from megabatch.simulate.profile import Profile, ProfiledGradient, ProfilePoint
from megabatch.simulate.request import ModelSettings
from megabatch.simulate.scenario import simulate
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.whatif import (
    changed_scenarios,
    changes,
    compare,
    exposed_by_algorithm,
    ladder,
    losses,
    run_all,
    smallest_within,
)
from megabatch.simulate.workload import load_workload

AUTO = AllReduceSettings()
ALEXNET = load_workload("alexnet")  # of few gradients, so choosing is quick


def job(
    cluster: str, batch: int | None = None, epochs: float | None = None, all_reduce: AllReduceSettings = AUTO
) -> Job:
    settings = ModelSettings(epochs=epochs)
    return job_of_model(ALEXNET, load_cluster(cluster), settings, all_reduce, batch, 1_281_167, 50_000)


def test_every_algorithm_that_applies_is_compared_and_the_choice_comes_last() -> None:
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


def test_where_nothing_is_rounded_flat_is_what_the_engine_has_anyhow() -> None:
    fp32 = replace(job("p40-roce100", 64), precision="fp32")
    assert [variant.label for variant in compare(fp32, load_cluster("p40-roce100"), [64])] == [
        "ring", "hierarchical", "torus", "auto",
    ]  # fmt: skip


def test_what_one_algorithm_exposes_is_what_it_exposes_alone() -> None:
    scenario = job("p40-roce100", 64).scenario(load_cluster("p40-roce100"), 64)
    found = exposed_by_algorithm(scenario)
    assert list(found.values()) == sorted(found.values())
    assert set(found) == {"ring", "flat", "hierarchical", "torus"}
    for algorithm, exposed_s in found.items():
        alone = replace(scenario, all_reduce=AllReduceSettings(algorithm=algorithm))
        assert simulate(alone).step.exposed_s == exposed_s


def test_a_profile_is_simulated_as_it_was_recorded() -> None:
    recorded = Profile(
        model="alexnet",
        image_size=224,
        num_classes=1000,
        precision="fp32",
        device="cpu",
        threads=2,
        gradients=[ProfiledGradient(name="fc.weight", num_elements=10**6, dtype="fp32")],
        points=[
            ProfilePoint(microbatch=b, forward_s=b / 10, backward_s=b / 5, forward_by_layer_s={}, ready_s=[b / 8])
            for b in (8, 16)
        ],
        update_s=0.5,
    )
    cluster = load_cluster("cpu-1gbe")
    profiled = job_of_model(ALEXNET, cluster, ModelSettings(), AUTO, None, 1000, 100, recorded)
    assert profiled.precision == "fp32" and profiled.batch_per_rank == 16
    simulated = simulate(profiled.scenario(cluster, 4))
    assert (simulated.step.forward_s, simulated.step.backward_s, simulated.step.update_s) == (1.6, 3.2, 0.5)
    assert sum(losses(simulated)) == pytest.approx(1) and ladder(profiled, cluster, [4])
    with pytest.raises(UserError, match=r"recorded with precision\.name=fp32, and this has precision\.name=fp16"):
        job_of_model(ALEXNET, cluster, ModelSettings(precision="fp16"), AUTO, 16, 1000, 100, recorded)
    with pytest.raises(UserError, match=r"recorded with data\.image_size=224"):
        job_of_model(ALEXNET, cluster, ModelSettings(image_size=192), AUTO, 16, 1000, 100, recorded)
    linked = replace(cluster, device=replace(cluster.device, curves={}))
    assert simulate(profiled.scenario(linked, 4)).step == simulated.step
    with pytest.raises(UserError, match="give it: --profile FILE"):
        job_of_model(ALEXNET, linked, ModelSettings(), AUTO, None, 1000, 100)


def test_a_node_that_reads_too_slowly_decides_the_step_and_what_would_help() -> None:
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
        assert len(steps[0].buckets) == 16  # one for each tensor
        assert steps[-1].total_s < steps[0].total_s


def test_the_ladder_of_a_cluster_without_16_bits_halves_what_travels_alone() -> None:
    variants = ladder(job("hkbu-10gbe", 64), load_cluster("hkbu-10gbe"), [16])
    assert [variant.varied["precision"] for variant in variants] == ["fp32"] * 5
    assert [variant.varied["wire"] for variant in variants] == ["fp32"] * 4 + ["fp16"]
    assert variants[4].results[0].step.exposed_s < variants[3].results[0].step.exposed_s


def test_what_a_change_buys_is_what_the_changed_cluster_does() -> None:
    before = simulate(job("hkbu-10gbe", 64).scenario(load_cluster("hkbu-10gbe"), 16))
    found = {change.label: change for change in changes(before)}
    shares = [change.share for change in found.values()]
    assert shares == sorted(shares, reverse=True) and min(shares) > 0.005
    faster = load_cluster("hkbu-10gbe", ["network.gbps=20"])
    after = simulate(job("hkbu-10gbe", 64).scenario(faster, 16))
    change = found["twice the network: network.gbps=20"]
    assert change.gained == pytest.approx(after.images_per_s - before.images_per_s)
    assert change.share == pytest.approx(after.images_per_s / before.images_per_s - 1)
    assert "16 bits between nodes: --wire fp16" in found  # fp32 travels
    assert not any("fused" in label for label in found)  # as they are already


def test_overlap_is_a_change_where_there_is_none() -> None:
    all_reduce = AllReduceSettings(overlap="none")
    without = simulate(job("hkbu-10gbe", 64, all_reduce=all_reduce).scenario(load_cluster("hkbu-10gbe"), 16))
    assert any("fused" in change.label for change in changes(without))


@pytest.mark.parametrize("has_room", [False, True])
def test_twice_the_batch_is_accumulated_where_the_device_has_no_room(has_room: bool) -> None:
    needed = memory_bytes(ALEXNET, "fp16", 128 if has_room else 127)
    cluster = load_cluster("p40-roce100", [f"device.memory_gb={needed / 1e9 + 1e-6}"])
    (doubled,) = (
        scenario
        for label, scenario in changed_scenarios(job("p40-roce100", 64).scenario(cluster, 8))
        if label == "twice the batch: 128 images a rank, 1,024 in all"
    )
    assert (doubled.batch_per_rank, doubled.accumulation) == (128, 1 if has_room else 2)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_losses_and_efficiency_make_the_whole_step(ranks: int) -> None:
    simulated = simulate(job("p40-roce100", 64).scenario(load_cluster("p40-roce100"), ranks))
    lost = losses(simulated)
    assert sum(lost) == pytest.approx(1) and min(lost) >= 0
    assert lost.computing == pytest.approx(simulated.efficiency)


def test_without_latencies_none_are_lost() -> None:
    still = ["node.alpha_us=0", "network.alpha_us=0", "engine.base_us=0"]
    lost = losses(simulate(job("p40-roce100", 64).scenario(load_cluster("p40-roce100", still), 64)))
    assert lost.latency == 0 and lost.carrying > 0


@pytest.mark.parametrize("minutes", [2, 5, 40, 300])
def test_the_smallest_cluster_within_a_time_is_the_first_of_all(minutes: float) -> None:
    cluster, trained = load_cluster("p40-roce100"), job("p40-roce100", 512, epochs=90)
    search = smallest_within(trained, cluster, 60 * minutes)
    counts = [8 * nodes for nodes in range(1, 80)]
    expected = next(
        (result.scenario.num_ranks for result in run_all(trained, cluster, counts) if (result.minutes or 0) <= minutes),
        None,
    )
    if expected:
        assert search.found and search.found.scenario.num_ranks == expected
    elif search.found:
        assert search.found.scenario.num_ranks > counts[-1] and (search.found.minutes or 0) <= minutes


def test_the_smallest_cluster_shares_the_batch_evenly() -> None:
    trained = replace(job("p40-roce100", epochs=90), global_batch=3 * 2**13, microbatch=128)
    search = smallest_within(trained, load_cluster("p40-roce100"), 60 * 20)
    assert search.found and (3 * 2**13) % search.found.scenario.num_ranks == 0


def test_a_time_in_which_no_cluster_does_it_has_a_fastest() -> None:
    search = smallest_within(job("p40-roce100", epochs=90), load_cluster("p40-roce100"), 1)
    assert search.found is None and search.fastest.minutes and search.fastest.minutes > 1 / 60
    assert search.most_ranks == 16_384


def test_a_batch_that_no_whole_node_shares_is_refused() -> None:
    odd = replace(job("p40-roce100", epochs=90), global_batch=127, microbatch=127)
    with pytest.raises(UserError, match=r"no number of whole nodes of 8 ranks shares batch\.global=127 evenly"):
        smallest_within(odd, load_cluster("p40-roce100"), 600)
