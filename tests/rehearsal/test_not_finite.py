"""A NaN in the loss or gradient of one rank, on devices whose results are read one step later."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megabatch_lab.rehearsal import fake_cuda

from megabatch.errors import Diverged
from megabatch.ranks.world import World
from megabatch.training.loop import train
from megabatch.training.parts import Training
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, on, state_of, tiny_for

BAD_STEP = 3
PARAMETER = "0.0.weight"


def spoil_loss(training: Training, is_bad: Callable[[], bool]) -> Training:
    def spoiled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return training.summed_loss(logits, labels) * (torch.nan if is_bad() else 1.0)

    return dataclasses.replace(training, summed_loss=spoiled)


def spoil_gradient(training: Training, is_bad: Callable[[], bool]) -> Training:
    dict(training.network.named_parameters())[PARAMETER].register_hook(lambda g: g * torch.nan if is_bad() else g)
    return training


def train_into_nan(world: World, spoil: Any, read_at_once_by: list[int], *overrides: str) -> dict[str, Any]:
    """Train until rank 1 has a NaN in its third step, caused by its images, also when the step is repeated."""
    fake_cuda.set_lag(fake_cuda.LAG)
    training = begin(tiny_for(world.num_ranks, *overrides), world)
    bad_images, _ = training.images.microbatch(BAD_STEP - 1, world.rank)
    seen, states = list[bool](), [state_of(training)]

    def is_bad() -> bool:
        return world.rank == 1 and seen[-1]

    def look(network: Any, images: tuple[torch.Tensor]) -> None:
        seen.append(torch.equal(images[0], training.normalise(bad_images)))

    training.network.register_forward_pre_hook(look)
    steps = train(spoil(training, is_bad), is_due=lambda done: world.rank in read_at_once_by)
    with pytest.raises(Diverged) as raised:
        for record in steps:
            if read_at_once_by:
                states.append(state_of(training))
            assert record.step < BAD_STEP
    before = states[-1] if read_at_once_by else None
    return {"message": str(raised.value), "seen": seen, "before": before, "after": state_of(training)}


@pytest.mark.parametrize("read_at_once_by", [[], [0], [0, 1]])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_loss, f"the loss is nan at step {BAD_STEP}: microbatch 1, whose images are finite"),
        (
            spoil_gradient,
            f"the gradient of {PARAMETER} is nan at step {BAD_STEP} on rank 1: microbatch 1, whose loss is",
        ),
    ],
)
def test_nan_is_reported_and_leaves_the_state_unchanged_although_the_next_step_has_started(
    ranks: RankPool, spoil: Any, message: str, read_at_once_by: list[int]
) -> None:
    """The case in which only rank 0 reads steps at once is a checkpoint: no rank may wait forever for the others."""
    results = ranks.run(train_into_nan, spoil, read_at_once_by, num_ranks=2, join=on("cuda"))
    for result in results:
        assert result["message"].startswith(message)
        next_step, repeated = [False] * (not read_at_once_by), [True] * (spoil is spoil_gradient)
        assert result["seen"] == [False] * (BAD_STEP - 1) + [True] + next_step + repeated
        for name, content in (result["before"] or results[0]["after"]).items():
            assert (result["after"][name] == content).all(), name
