"""Collectives that ranks use when a run starts."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megabatch.config.loading import load_config, silent
from megabatch.errors import UserError
from megabatch.ranks import collectives
from megabatch.ranks.machine import fair_threads
from megabatch.ranks.world import FirstRankFailed, World
from megabatch.training import prepare
from megabatch.training.prepare import require_same_gradients
from tests.support.photos import make_folder
from tests.support.rank_pool import RankPool


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 4, 5, 6, generator=generator)
    return {
        "b.channels_last": images.to(memory_format=torch.channels_last),
        "a.fp16": torch.randn(7, generator=generator).half(),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3),
        "none": torch.empty(0),
        "double": torch.tensor([float("nan"), float("inf"), 1e-310], dtype=torch.float64),
        "bf16": torch.randn(3, generator=generator).bfloat16(),
        "int": torch.tensor([[2**62, -1]]),
    }


def broadcast(world: World, piece_bytes: int) -> list[tuple[str, torch.Tensor]]:
    before, collectives.PIECE_BYTES = collectives.PIECE_BYTES, piece_bytes
    try:
        return list(world.broadcast_tensors(tensors() if world.rank == 0 else {}).items())
    finally:
        collectives.PIECE_BYTES = before


@pytest.mark.parametrize("piece_bytes", [2**20, 100])
def test_tensors_of_every_dtype_arrive_bitwise_identical_and_in_order(ranks: RankPool, piece_bytes: int) -> None:
    for received in ranks.run(broadcast, piece_bytes, num_ranks=min(3, ranks.size)):
        assert [name for name, _ in received] == list(tensors())
        for (_, found), expected in zip(received, tensors().values(), strict=True):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert found.is_contiguous()
            assert torch.equal(found.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


def broadcast_nothing(world: World) -> dict[str, torch.Tensor]:
    return world.broadcast_tensors({})


def test_broadcast_of_no_tensors_is_empty(ranks: RankPool) -> None:
    assert ranks.run(broadcast_nothing, num_ranks=2) == [{}, {}]


def gather(world: World) -> tuple[list[Any], list[list[int]], list[float]]:
    values = world.all_gather(["größe", *["line"] * world.rank] if world.rank else [])
    return values, world.gather_numbers([world.rank, -(2**62)]), world.all_reduce_max([0.1 * world.rank, -world.rank])


def test_values_are_gathered_in_rank_order(ranks: RankPool) -> None:
    for values, numbers, largest in ranks.run(gather, num_ranks=3):
        assert values == [[], ["größe", "line"], ["größe", "line", "line"]]
        assert numbers == [[rank, -(2**62)] for rank in range(3)]
        assert largest == [0.2, 0.0]


def compare(world: World, texts: list[str]) -> Any:
    return world.first_difference(texts[world.rank])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["a", "a", "a"], None), (["a", "a", "ß"], (2, "a", "ß")), (["a", "", "b"], (1, "a", ""))],
)
def test_all_ranks_get_the_first_rank_that_differs_from_rank_0(
    ranks: RankPool, texts: list[str], expected: tuple[int, str, str] | None
) -> None:
    assert ranks.run(compare, texts, num_ranks=3) == [expected] * 3


def make_on_rank_0(world: World, problem: str) -> tuple[str, str]:
    def make() -> list[float]:
        assert world.rank == 0
        if problem == "user":
            raise UserError("the set cannot be read; fix it")
        if problem == "ours":
            raise KeyError("index")
        return [0.1, 1 / 3]

    try:
        return "made", json.dumps(world.from_rank_0(make, list[float]))
    except (UserError, KeyError, FirstRankFailed) as error:
        return type(error).__name__, str(error)


def test_all_ranks_get_the_value_or_error_of_rank_0(ranks: RankPool) -> None:
    made, mistake, bug = (ranks.run(make_on_rank_0, problem, num_ranks=3) for problem in ("", "user", "ours"))
    assert made == [("made", json.dumps([0.1, 1 / 3]))] * 3
    assert mistake == [("UserError", "the set cannot be read; fix it")] * 3
    assert bug == [("KeyError", "'index'"), ("FirstRankFailed", "'index'"), ("FirstRankFailed", "'index'")]


def train_other_parameters(world: World) -> str:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].requires_grad_(world.rank != 1)
    try:
        require_same_gradients((name for name, p in network.named_parameters() if p.requires_grad), world)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_train_different_parameters_are_reported(ranks: RankPool) -> None:
    message = "0.bias has a gradient on rank 0 and none on rank 1; all ranks must train the same parameters"
    assert ranks.run(train_other_parameters, num_ranks=3) == [message] * 3


def share(world: World, hosts: str, cores: list[list[int]]) -> int:
    before = prepare.host_identity, prepare.usable_cores
    prepare.host_identity, prepare.usable_cores = lambda: hosts[world.rank], lambda: frozenset(cores[world.rank])
    try:
        return prepare.share_of_cores(world)[0]
    finally:
        prepare.host_identity, prepare.usable_cores = before


def load(world: World, folder: str, hosts: str) -> tuple[str, int]:
    """Return the fingerprint of a data set, and the number of files whose state this rank requested."""
    asked, stat = list[str](), os.stat

    def counted(path: Any, **options: Any) -> os.stat_result:
        asked.append(str(path))
        return stat(path, **options)

    here = [rank for rank in range(world.num_ranks) if hosts[rank] == hosts[world.rank]]
    config = load_config("smoke", [f"data.source={folder}", "data.validation=0.3"], report=silent)
    with ExitStack() as shared, mock.patch.object(os, "stat", counted):
        data = prepare.load_once_per_host(config, world, here, shared)
        world.barrier()
    return data.fingerprint(), sum(path.startswith(folder) for path in asked)


@pytest.mark.parametrize("num_classes", [2, 9])
def test_one_rank_of_a_host_checks_the_data_set(ranks: RankPool, tmp_path: Path, num_classes: int) -> None:
    folder = make_folder(
        tmp_path / "set", per_class=3, classes=tuple(f"class{number}" for number in range(num_classes))
    )
    ranks.run(load, str(folder), "aaab", num_ranks=4)  # writes the cache
    fingerprints, asked = zip(*ranks.run(load, str(folder), "aaab", num_ranks=4), strict=True)
    assert len(set(fingerprints)) == 1
    assert asked[1] == asked[2] < 9  # for any number of classes
    assert asked[0] == asked[3] >= asked[1] + num_classes


EIGHT = list(range(8))


@pytest.mark.parametrize(
    ("hosts", "cores"),
    [
        ("aaa", [EIGHT] * 3),  # torchrun: ranks share all cores
        ("aab", [EIGHT] * 3),
        ("aaaa", [[2 * rank, 2 * rank + 1] for rank in range(4)]),  # srun: separate cores
        ("aabb", [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7], EIGHT, EIGHT]),  # overlapping on one host
        ("abab", [[0, 1, 2], [0, 1], [2, 3, 4, 5], [0]]),
    ],
)
def test_share_of_cores_matches_fair_threads(ranks: RankPool, hosts: str, cores: list[list[int]]) -> None:
    known = [(host, frozenset(of_rank)) for host, of_rank in zip(hosts, cores, strict=True)]
    expected = [fair_threads(rank, known) for rank in range(len(hosts))]
    for _ in range(2):
        assert ranks.run(share, hosts, cores, num_ranks=len(hosts)) == expected


def read_nothing(world: World) -> str:
    from megabatch.data.pipeline.images import PixelStatistics
    from megabatch.data.pipeline.normalise import measure_pixels

    class Unreadable:
        labels = torch.zeros(4, dtype=torch.int64)

        def __len__(self) -> int:
            return 4

        def read(self, samples: Any) -> torch.Tensor:
            assert world.rank == 0, "one rank measures"
            return torch.full((len(samples), 1, 2, 2), float("nan"))

    with pytest.raises(UserError) as caught:
        world.from_rank_0(lambda: measure_pixels(Unreadable()), PixelStatistics)
    return str(caught.value)


def test_all_ranks_get_the_same_error_for_images_that_cannot_be_measured(ranks: RankPool) -> None:
    messages = ranks.run(read_nothing, num_ranks=3)
    assert len(set(messages)) == 1
    assert "image 0 of the training set is not finite" in messages[0]
