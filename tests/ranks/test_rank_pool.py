"""Failures of a rank reach the test with the name of the function and the rank."""

import os
import time

import pytest
import torch

from megabatch.comm.api import distribute
from megabatch.comm.settings import CommSettings
from megabatch.ranks.world import World
from tests.support.rank_pool import RankPool, RanksFailed


def hang_on_last(world: World) -> None:
    if world.rank == world.num_ranks - 1:
        time.sleep(60)


def fail_on_first(world: World) -> None:
    if world.rank == 0:
        raise RuntimeError("the first rank is unwell")
    world.all_reduce(torch.ones(1, device=world.device))


def die_on_first(world: World) -> None:
    if world.rank == 0:
        os._exit(3)


def number(world: World) -> tuple[int, int, float]:
    return (
        world.rank,
        world.num_ranks,
        world.all_reduce(torch.full((3,), 2.0**world.rank, device=world.device))[0].item(),
    )


def test_every_rank_runs_the_function_and_all_reduces(ranks: RankPool) -> None:
    for num_ranks in range(1, ranks.size + 1):
        expected = [(rank, num_ranks, 2.0**num_ranks - 1) for rank in range(num_ranks)]
        assert ranks.run(number, num_ranks=num_ranks) == expected


def test_hangs_errors_and_crashes_are_reported_and_do_not_affect_the_next_test(ranks: RankPool) -> None:
    last = min(2, ranks.size) - 1
    with pytest.raises(RanksFailed, match=rf"hang_on_last: no answer from ranks \[{last}\]"):
        ranks.run(hang_on_last, num_ranks=last + 1, timeout_s=2)
    with pytest.raises(RanksFailed, match=r"rank 0:(.|\n)*the first rank is unwell"):
        ranks.run(fail_on_first, num_ranks=last + 1)
    with pytest.raises(RanksFailed, match="rank 0:\nits process exited without a message"):
        ranks.run(die_on_first, num_ranks=last + 1)
    assert ranks.run(number, num_ranks=1) == [(0, 1, 1.0)]


def gradient_of_shares(world: World, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Return gradients of sum(w * x), which are x = 10^rank: of one pass without all-reduce, then of two with it."""
    layer = torch.nn.Linear(3, 1, bias=False, device=world.device, dtype=dtype)
    model, gradients = distribute(layer, world, CommSettings())
    x = torch.full((1, 3), 10.0**world.rank, device=world.device, dtype=dtype)
    with model.no_sync():
        model(x).sum().backward()
    assert gradients.num_steps == 0  # no bucket was all-reduced
    before = layer.weight.grad[0].tolist()  # type: ignore[index]
    model(x).sum().backward()
    assert gradients.num_steps == 1
    return before, layer.weight.grad[0].tolist()  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_summed_and_only_at_the_last_microbatch(ranks: RankPool, dtype: torch.dtype) -> None:
    for num_ranks in range(1, ranks.size + 1):
        total = 2 * sum(10.0**rank for rank in range(num_ranks))
        for rank, (before, after) in enumerate(ranks.run(gradient_of_shares, dtype, num_ranks=num_ranks)):
            assert before == [10.0**rank] * 3
            assert after == [total] * 3
