"""Accelerators: the results of a step are read during the next one, unless a rank needs them at once."""

import dataclasses
from typing import Any

import pytest
import torch
from megabatch_lab.rehearsal import fake_cuda

from megabatch.errors import RanksDiffer
from megabatch.ranks.world import World
from megabatch.training.loop import train
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, on, tiny_for

SAVED = (4, 5, 9)  # steps whose weights rank 0 saves


def train_until_stopped(world: World, stop: int) -> list[tuple[int, bool]]:
    """Request a stop from rank 1 in step `stop`; return the steps, and whether they were read at once."""
    fake_cuda.set_lag(fake_cuda.LAG)
    seen: list[tuple[int, bool]] = []
    training = begin(tiny_for(world.num_ranks), world)

    def stop_requested() -> bool:
        return world.rank == 1 and training.gradients.num_steps >= stop

    is_due = (lambda done: done in SAVED) if world.rank == 0 else (lambda done: False)
    for record in train(dataclasses.replace(training, stop_requested=stop_requested), is_due=is_due):
        is_current = record.step == training.gradients.num_steps
        seen.append((record.step, is_current))
        assert training.comparison.covers(record.step) == is_current
    return seen


@pytest.mark.parametrize("stop", [4, 6, 7])
def test_ranks_stop_together_and_read_saved_steps_at_once(ranks: RankPool, stop: int) -> None:
    first, second = ranks.run(train_until_stopped, stop, num_ranks=2, join=on("cuda"))
    assert first == second
    steps = [step for step, _ in first]
    assert steps == list(range(1, len(steps) + 1)) and stop <= len(steps) <= stop + 2
    expected = {1, *SAVED, steps[-1]} & set(steps)  # no rank can ask before the first
    assert {step for step, is_current in first if is_current} == expected


def drift_apart(world: World) -> tuple[str, list[Any]]:
    fake_cuda.set_lag(fake_cuda.LAG)
    training = begin(tiny_for(world.num_ranks, "run.compare_every=8"), world)
    with pytest.raises(RanksDiffer) as raised:
        for record in train(training):
            if record.step == 5 and world.rank == 2:
                with torch.no_grad():
                    training.master_weights.weights["0.0.weight"][0, 0, 0, 0] += 1.0
    return str(raised.value), fake_cuda.seen("hazard")


def test_drifting_rank_is_named_by_the_others(ranks: RankPool) -> None:
    for message, hazards in ranks.run(drift_apart, num_ranks=3, join=on("cuda")):
        assert message.startswith("rank 2 differs from the others after step 8, and not after step 1: 0.0.weight;")
        assert hazards == []
