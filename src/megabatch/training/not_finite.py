"""Checks that end a run when a loss or gradient is inf or NaN, and the search for the cause.

Losses and all-reduced gradients are the same on all ranks, so all ranks raise after the same step.  That step did not
change the weights, and a checkpoint never contains inf or NaN.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from msgspec import Struct

from megabatch.data.pipeline.order import dropout_seed
from megabatch.errors import Diverged, NotRepeated, UserError
from megabatch.precision.loss_scale import show_scale
from megabatch.text import name_ranks
from megabatch.training.device import seed_dropout
from megabatch.training.parts import Training

# Repetition of a failed step on each rank, to find the rank whose gradient is inf or NaN.
#
# The all-reduced gradients do not show it.  Images, crops and dropout are functions of counters, and a failed step does
# not change the weights: so its backward passes can be repeated exactly, without the all-reduce.


class BadGradient(Struct, frozen=True):
    """The first gradient that is inf or NaN on a rank."""

    rank: int
    parameter: str  # the first one in backward; later ones are consequences
    value: str
    microbatch: int
    loss: float  # mean over the microbatch's images


def find_bad_gradients(run: Training, step: int) -> list[BadGradient]:
    """Return the first bad gradient of each rank that has one.  `step` counts from 0.

    All ranks call it.  Gradients are overwritten.
    """
    found = run.world.all_gather(repeat_step(run, step), BadGradient | None)
    return [bad for bad in found if bad]


def repeat_step(run: Training, step: int) -> BadGradient | None:
    """Repeat forward and backward on this rank.  Gradients become the sum over its microbatches."""
    run.world.activity.begin("repetition")
    run.master_weights.clear_gradients(accumulates=True)
    with preserve_buffers(run.network):
        for index in run.plan.microbatches_of(run.world.rank):
            images, labels = run.images.microbatch(step, index)
            seed_dropout(dropout_seed(run.seed, step, index), run.world.device)
            with run.model.no_sync():
                mix = run.mixing(step, index, *images.shape[2:])
                logits = run.model(run.normalise(images, mix))
                loss = run.summed_loss(logits, run.targets(labels, logits, mix)) / run.plan.global_batch
                run.loss_scale.scaled(loss).backward()
            bad = first_bad_gradient(local_gradients(run))
            if bad:
                mean = loss.item() * run.plan.global_batch / len(labels)
                return BadGradient(run.world.rank, *bad, index, mean)
    return None


def find_bad_sum(run: Training) -> str | None:
    """Return the parameter whose gradients are finite on every rank but whose sum, or its norm, is not; None if none.

    All ranks call it, after `repeat_step` found no bad gradient on any rank.
    """
    gradients = {name: gradient.to(run.update_dtype, copy=True) for name, gradient in local_gradients(run).items()}
    for name, gradient in reversed(gradients.items()):
        if not torch.linalg.vector_norm(run.world.all_reduce(gradient)).isfinite():
            return name
    return None


def local_gradients(run: Training) -> dict[str, torch.Tensor]:
    parameters = run.master_weights.parameters.items()
    return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}


def first_bad_gradient(gradients: dict[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the first bad parameter in the order of backward (reverse model order), and "nan" or "inf"."""
    for name, gradient in reversed(gradients.items()):
        if not gradient.isfinite().all():
            return name, "nan" if gradient.isnan().any() else "inf"
    return None


@contextmanager
def preserve_buffers(network: torch.nn.Module) -> Iterator[None]:
    """Restore the buffers, such as BatchNorm's statistics, when the context ends."""
    before = [buffer.clone() for buffer in network.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, content in zip(network.buffers(), before, strict=True):
                buffer.copy_(content)


REMEDY = "lower optim.learning_rate, lengthen schedule.warmup_epochs"
UNCHANGED = "the weights are those before that step"
TRANSIENT = "a transient fault of a rank's memory, device or link; start again to resume from the last checkpoint"


class Cause(Struct, frozen=True):
    text: str
    is_an_image: bool  # False: training diverged


def check_loss(run: Training, loss: float, step: int, losses: torch.Tensor) -> None:
    """Raise if the step's loss is not finite.  `step` counts from 0; `losses` are those of this rank's microbatches."""
    if math.isfinite(loss):
        return
    found = run.world.all_gather(find_causes(run, step, losses), list[Cause])
    causes = [cause for causes in found for cause in causes]
    cause = causes[0] if causes else Cause("the sum over microbatches is too large; lower optim.learning_rate", False)
    raise (UserError if cause.is_an_image else Diverged)(f"the loss is {loss} at step {step + 1}: {cause.text}")


def find_causes(run: Training, step: int, losses: torch.Tensor) -> list[Cause]:
    """Return the cause and remedy for each microbatch of this rank whose loss is not finite."""
    rate = f"learning rate {run.learning_rate(step):.4g}"
    remedy = f"{REMEDY}, or set optim.clip_norm"
    if run.loss_scale.is_on:
        remedy += "; if activations overflow fp16, set precision.name=bf16"
    causes = []
    finite = losses.isfinite().tolist()
    for index in [
        index for index, good in zip(run.plan.microbatches_of(run.world.rank), finite, strict=True) if not good
    ]:
        images, _ = run.images.microbatch(step, index)  # the same images as in the step
        samples, _ = run.images.samples(step, index)
        bad = samples[~run.normalise(images).isfinite().flatten(1).all(1).cpu().numpy()]
        causes.append(
            Cause(
                f"microbatch {index} has image {bad[0]} of the training set, which is not finite; fix the image", True
            )
            if len(bad)
            else Cause(f"microbatch {index}, whose images are finite ({rate}); {remedy}", False)
        )
    return causes


def check_gradients(run: Training, step: int) -> None:
    """Raise with the rank and the cause.  Called after a step with a finite loss and gradients that are not."""
    summed = None if run.clip_norm else run.master_weights.first_overflow()  # clipping by a NaN norm makes all NaN
    bad = find_bad_gradients(run, step)
    if bad:
        first, rate = bad[0], f"learning rate {run.learning_rate(step):.4g}"
        raise Diverged(
            f"the gradient of {first.parameter} is {first.value} at step {step + 1} on {ranks_of(bad)}: microbatch "
            f"{first.microbatch}, whose loss is {first.loss:.4g} ({rate}); {UNCHANGED}; {REMEDY}, or check "
            f"custom losses, backwards and hooks for divisions, roots and logarithms"
        )
    name = find_bad_sum(run)
    if name:
        raise Diverged(
            f"the gradient of {name} is finite on every rank at step {step + 1}, but its sum over ranks overflows; "
            f"{UNCHANGED}; {REMEDY}"
        )
    raise NotRepeated(
        f"the gradient of {summed or 'some parameter'} was inf or NaN at step {step + 1}, but is finite when every "
        f"rank repeats its part of the step: {TRANSIENT} ({UNCHANGED})"
    )


def ranks_of(bad: list[BadGradient]) -> str:
    return name_ranks([gradient.rank for gradient in bad])


def check_scale(run: Training, step: int) -> None:
    """Raise after an overflow if there is no lower loss scale to try."""
    if run.loss_scale.is_exhausted:
        scale, often = show_scale(run.loss_scale.value), run.loss_scale.overflows_in_a_row + 1
        remedy = "omit precision.loss_scale" if run.loss_scale.kind == "fixed" else "lower optim.learning_rate"
        summed = run.master_weights.first_overflow() or "some parameter"
        bad = find_bad_gradients(run, step)
        where = f" on {ranks_of(bad)} (microbatch {bad[0].microbatch})" if bad else ""
        raise Diverged(
            f"the gradient of {bad[0].parameter if bad else summed} overflows at step {step + 1} with a loss "
            f"scale of {scale}, {often} step{'s' * (often > 1)} in a row{where}; {remedy}, or set "
            "precision.name=bf16"
        )


def check_test_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the test loss is {loss} after step {step + 1}; {REMEDY}, or set optim.clip_norm")
