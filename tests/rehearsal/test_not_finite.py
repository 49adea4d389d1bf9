"""A loss that is NaN on one rank, on devices whose results are read a step later."""

import dataclasses
from typing import Any

import pytest
import torch

from megabatch.errors import Diverged
from megabatch.ranks.world import World
from megabatch.train.loop import train
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, on, state_of, tiny_for

BAD_STEP = 3


def train_into_nan(world: World, reads_at_once: bool) -> dict[str, Any]:
    """Rank 1 has a NaN in its third step."""
    training = begin(tiny_for(world.num_ranks), world)
    calls, states = [], [state_of(training)]

    def spoiled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return training.summed_loss(logits, labels) * (torch.nan if world.rank and len(calls) == BAD_STEP else 1.0)

    steps = train(dataclasses.replace(training, summed_loss=spoiled), is_due=lambda done: reads_at_once)
    with pytest.raises(Diverged) as raised:
        for record in steps:
            states.append(state_of(training))
            assert record.step < BAD_STEP
    return {"said": str(raised.value), "calls": len(calls), "before": states[-1], "after": state_of(training)}


def test_a_nan_is_named_with_its_step_and_rank_though_the_next_step_was_begun(ranks: RankPool) -> None:
    for result in ranks.run(train_into_nan, False, num_ranks=2, join=on("cuda")):
        assert result["said"].startswith(f"the loss is nan at step {BAD_STEP}: microbatch 1, whose images are finite")
        assert result["calls"] == BAD_STEP + 1


def test_a_nan_loss_leaves_weights_optimizer_and_statistics_as_they_were(ranks: RankPool) -> None:
    for result in ranks.run(train_into_nan, True, num_ranks=2, join=on("cuda")):
        assert result["calls"] == BAD_STEP
        assert result["before"].keys() == result["after"].keys()
        for name, content in result["before"].items():
            assert (result["after"][name] == content).all(), name
