"""The smallest cluster that finishes in time, compared with an exhaustive search."""

import pytest
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.simulate.compute import memory_bytes
from megabatch.simulate.job import Job, job_of_model
from megabatch.simulate.load import load_cluster
from megabatch.simulate.request import ModelSettings
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.whatif import run_all, smallest_within
from megabatch.simulate.workload import load_workload

ALEXNET = load_workload("alexnet")  # few gradients, so choosing is fast
PAPER = load_cluster("p40-roce100")


def job(batch: int | None = None, epochs: float = 90) -> Job:
    settings = ModelSettings(epochs=epochs)
    return job_of_model(ALEXNET, PAPER, settings, AllReduceSettings(), batch, 1_281_167, 50_000)


def test_the_search_equals_an_exhaustive_search() -> None:
    cluster, trained = PAPER, job(512)
    minutes = {result.scenario.num_ranks: result.minutes for result in run_all(trained, cluster, range(8, 520, 8))}
    for expected in (8, 16, 24, 136, 248, 512):
        limit = minutes[expected]
        assert limit and expected == next(count for count, taken in minutes.items() if taken and taken <= limit)
        found = smallest_within(trained, cluster, 60 * limit * 1.0001).found
        assert found and found.scenario.num_ranks == expected


def test_the_search_skips_clusters_without_enough_memory() -> None:
    trained = replace(job(), global_batch=2**16)  # one microbatch per rank
    fitting = memory_bytes(ALEXNET, "fp16", 2**16 / 64)
    cluster = load_cluster("p40-roce100", [f"device.memory_gb={fitting / 1e9 + 1e-6}"])
    with pytest.raises(UserError, match="images per microbatch"):
        trained.scenario(cluster, 32)
    search = smallest_within(trained, cluster, 3600 * 24)
    assert search.found and search.found.scenario.num_ranks == 64
    narrow = replace(cluster, device=replace(cluster.device, memory_gb=0.1))
    with pytest.raises(UserError, match="no batch fits"):
        smallest_within(trained, narrow, 600)


def test_the_search_ends_if_one_batch_is_the_whole_run() -> None:
    short = job(512, epochs=1)
    with pytest.raises(UserError, match="less than one step"):
        short.scenario(PAPER, 16_384)
    search = smallest_within(short, PAPER, 1e-3)
    assert search.found is None and search.most_ranks == 1_281_167 // 512 // 8 * 8


def test_the_smallest_cluster_divides_the_batch_evenly() -> None:
    trained = replace(job(), global_batch=3 * 2**13, microbatch=128)
    search = smallest_within(trained, PAPER, 60 * 20)
    assert search.found and (3 * 2**13) % search.found.scenario.num_ranks == 0


def test_a_time_that_is_too_short_returns_the_fastest_cluster() -> None:
    search = smallest_within(job(), PAPER, 1)
    assert search.found is None and search.fastest.minutes and search.fastest.minutes > 1 / 60
    assert search.most_ranks == 16_384


def test_a_batch_that_no_number_of_nodes_divides_is_rejected() -> None:
    odd = replace(job(), global_batch=127, microbatch=127)
    with pytest.raises(UserError, match=r"whole nodes of 8 ranks .*batch\.global=127"):
        smallest_within(odd, PAPER, 600)
