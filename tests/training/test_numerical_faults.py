"""Numerical faults of one rank: the error names rank, step and parameter, and weights are unchanged."""

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megabatch.errors import Diverged, NotRepeated, RanksDiffer, UserError
from megabatch.ranks.world import World
from megabatch.runs.records import StepRecord
from megabatch.training import loop
from megabatch.training.checkpoint.state import training_state
from megabatch.training.loop import train
from megabatch.training.parts import Training
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import state_of
from tests.support.small_runs import begin_small

FAULTY_STEP = 3  # counted from 1, as in messages
FAULTY_RANK = 1
PARAMETER = "2.0.weight"


def train_to_the_fault(training: Training, error: type[Exception], arm: Any) -> dict[str, Any]:
    """Train until the error; call `arm` after the last good step."""
    states = [state_of(training)]
    with pytest.raises(error) as raised:
        for record in train(training):
            assert isinstance(record, StepRecord)
            states.append(state_of(training))
            if record.step == FAULTY_STEP - 1:
                arm()
    same = all((content == state_of(training)[name]).all() for name, content in states[-1].items())
    return {"said": str(raised.value), "steps": len(states) - 1, "same": same}


class Spoil:
    """A hook that changes a parameter's gradient on one rank."""

    def __init__(self, world: World, training: Training, value: float, times: int) -> None:
        self.left, self.value, self.times = 0, value, times if world.rank == FAULTY_RANK else 0
        dict(training.network.named_parameters())[PARAMETER].register_hook(self.spoil)

    def arm(self) -> None:
        self.left = self.times

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.left:
            return gradient
        self.left -= 1
        spoilt = gradient.clone()
        spoilt[0, 1, 2, 2] = self.value
        return spoilt


def spoil_a_gradient(world: World, value: float, times: int, error: type[Exception], *overrides: str) -> dict[str, Any]:
    training = begin_small(world, *overrides)
    return train_to_the_fault(training, error, Spoil(world, training, value, times).arm)


FP32 = ("precision.name=fp32",)


@pytest.mark.parametrize(
    ("value", "overrides"),
    [
        (torch.nan, FP32),
        (-torch.inf, (*FP32, "optim.name=lars", "model.options.dropout=0.3")),
        (torch.nan, (*FP32, "optim.clip_norm=0.5", "batch.micro=16")),
        (torch.inf, ("precision.name=bf16", "data.augment.cutmix=1.0")),
    ],
)
def test_a_bad_gradient_is_named_with_rank_step_and_parameter(
    ranks: RankPool, value: float, overrides: tuple[str, ...]
) -> None:
    results = ranks.run(spoil_a_gradient, value, 10**9, Diverged, *overrides, num_ranks=2)
    kind = "nan" if value != value else "inf"
    for result in results:
        assert result["said"].startswith(
            f"the gradient of {PARAMETER} is {kind} at step {FAULTY_STEP} on rank {FAULTY_RANK}: microbatch "
        )
        assert re.search(r"whose loss is [12]\.\d+ ", result["said"]) and result["said"] == results[0]["said"]
        assert result["steps"] == FAULTY_STEP - 1 and result["same"]


def test_a_fault_that_does_not_repeat_is_a_machine_fault_and_allows_a_restart(ranks: RankPool) -> None:
    for result in ranks.run(spoil_a_gradient, torch.nan, 1, NotRepeated, *FP32, num_ranks=2):
        assert f"the gradient of {PARAMETER} was inf or NaN at step {FAULTY_STEP}, but is finite when" in result["said"]
        assert result["steps"] == FAULTY_STEP - 1 and result["same"]
    assert not issubclass(NotRepeated, UserError)  # ranks are not restarted after a UserError


def passes_over_gradients(world: World, *overrides: str) -> int:
    """Count passes over gradients in five steps, without those of the all-reduce and the optimizer."""
    records = train(begin_small(world, *FP32, *overrides))
    with patch.object(loop, "has_bad_gradient", wraps=loop.has_bad_gradient) as look:
        for _ in range(5):
            next(records)
    records.close()
    return sum(norm is None for _, norm in (call.args for call in look.call_args_list))


@pytest.mark.parametrize(("overrides", "expected"), [((), 1), (("optim.name=lars",), 0), (("optim.clip_norm=1",), 0)])
def test_a_steady_step_on_one_host_does_not_read_gradients_again(
    ranks: RankPool, overrides: tuple[str, ...], expected: int
) -> None:
    """The first step is an exception: the all-reduce was not asked to check yet."""
    assert ranks.run(passes_over_gradients, *overrides, num_ranks=2) == [expected] * 2


def overflow_in_the_sum(world: World, *overrides: str) -> dict[str, Any]:
    training = begin_small(world, *FP32, "batch.micro=16", *overrides)
    armed: list[int] = []

    def enlarge(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, 2e38) if armed else gradient

    dict(training.network.named_parameters())[PARAMETER].register_hook(enlarge)
    return train_to_the_fault(training, Diverged, lambda: armed.append(1))


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_an_overflow_in_the_all_reduce_is_not_reported_as_a_rank_fault(ranks: RankPool, optimizer: str) -> None:
    for result in ranks.run(overflow_in_the_sum, f"optim.name={optimizer}", num_ranks=2):
        assert (
            f"the gradient of {PARAMETER} is finite on every rank at step {FAULTY_STEP}, but its sum" in result["said"]
        )
        assert result["same"]


def drift_apart(world: World, rank: int, tensor: str, factor: float, *overrides: str) -> tuple[str, int]:
    """Change one element of one tensor on one rank after step 5."""
    training, steps = begin_small(world, *FP32, *overrides), 0
    with pytest.raises(RanksDiffer) as raised:
        for record in train(training):
            if isinstance(record, StepRecord):
                steps = record.step
                if steps == 5 and world.rank == rank:
                    with torch.no_grad():
                        training_state(training)[tensor][0, 1, 2, 2].mul_(factor)
    return str(raised.value), steps


# One bit of a weight is enough.  One bit of momentum may be lost when it is added to the weight.
@pytest.mark.parametrize(
    ("rank", "tensor", "factor"),
    [(2, f"model.{PARAMETER}", 1 + 2.0**-23), (0, f"optimizer.{PARAMETER}.momentum_buffer", 1.5)],
)
def test_a_rank_that_drifts_apart_is_named_by_the_others(
    ranks: RankPool, rank: int, tensor: str, factor: float
) -> None:
    for said, steps in ranks.run(
        drift_apart, rank, tensor, factor, "run.compare_every=4", "batch.global=24", num_ranks=3
    ):
        assert steps == 7  # the record of step 8, after which a checkpoint could be written, is not returned
        assert said.startswith(f"rank {rank} differs from the others after step 8, and not after step 4: {PARAMETER}")
        assert ("checkpoints after step 4 may contain the difference" in said) == (rank == 0)
