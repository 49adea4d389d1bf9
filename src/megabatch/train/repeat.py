"""A step again, on each rank by itself: whose gradient is inf or NaN?

What was all-reduced does not tell.  But images, crops and dropout are functions of counters, and a step that failed has
left the weights as they were: so its backward passes can be repeated, as the step took them, without the all-reduce.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from megabatch.data.philox import dropout_seed
from megabatch.train.device import seed_dropout

if TYPE_CHECKING:
    from megabatch.train.parts import Training


class BadGradient(Struct, frozen=True):
    """The first that is inf or NaN on a rank."""

    rank: int
    parameter: str  # the one that backward reached first: those after it follow
    value: str
    microbatch: int
    loss: float  # of the microbatch, the mean over its images


def find_bad_gradients(run: "Training", step: int) -> list[BadGradient]:
    """Of every rank that has one; all ranks call it.  `step` counts from 0.  Gradients are overwritten."""
    found = run.world.all_gather(repeat_step(run, step), BadGradient | None)
    return [bad for bad in found if bad]


def repeat_step(run: "Training", step: int) -> BadGradient | None:
    """Forward and backward on this rank; leaves the sum over its microbatches in the gradients."""
    run.world.activity.begin("repetition")
    run.master_weights.clear_gradients(accumulates=True)
    with buffers_kept(run.network):
        for index in run.plan.microbatches_of(run.world.rank):
            images, labels = run.images.microbatch(step, index)
            seed_dropout(dropout_seed(run.seed, step, index), run.world.device)
            with run.model.no_sync():
                logits = run.model(run.normalise(images))
                loss = run.summed_loss(logits, labels.to(logits.device)) / run.plan.global_batch
                run.loss_scale.scaled(loss).backward()
            bad = first_bad(local_gradients(run))
            if bad:
                mean = loss.item() * run.plan.global_batch / len(labels)
                return BadGradient(run.world.rank, *bad, index, mean)
    return None


def find_bad_sum(run: "Training") -> str | None:
    """After `repeat_step` has found nothing on any rank: the parameter whose gradients are finite on every rank, and
    whose sum over ranks, or its norm, is not.  All ranks call it."""
    gradients = {name: gradient.to(run.update_dtype, copy=True) for name, gradient in local_gradients(run).items()}
    for name, gradient in reversed(gradients.items()):
        if not torch.linalg.vector_norm(run.world.all_reduce(gradient)).isfinite():
            return name
    return None


def local_gradients(run: "Training") -> dict[str, torch.Tensor]:
    parameters = run.master_weights.parameters.items()
    return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}


def first_bad(gradients: dict[str, torch.Tensor]) -> tuple[str, str] | None:
    """The parameter that backward reached first, as it comes last in the model, and what its gradient is."""
    for name, gradient in reversed(gradients.items()):
        if not gradient.isfinite().all():
            return name, "nan" if gradient.isnan().any() else "inf"
    return None


@contextmanager
def buffers_kept(network: torch.nn.Module) -> Iterator[None]:
    """BatchNorm's statistics, and whatever else a forward pass moves, are afterwards what they were."""
    before = [buffer.clone() for buffer in network.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, content in zip(network.buffers(), before, strict=True):
                buffer.copy_(content)
