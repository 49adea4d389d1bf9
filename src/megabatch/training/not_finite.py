"""Where inf and NaN end a run: what is said, and what it is found from.

Losses and sums of gradients are the same on all ranks, so all ranks end here together, after the same step, which has
changed no weight.  The last checkpoint stays: none is ever written with inf or NaN in it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from megabatch.data.pipeline.order import dropout_seed
from megabatch.errors import Diverged, NotRepeated, UserError
from megabatch.precision.loss_scale import show_scale
from megabatch.training.device import seed_dropout

if TYPE_CHECKING:
    from megabatch.training.parts import Training

# A step again, on each rank by itself: whose gradient is inf or NaN?
#
# What was all-reduced does not tell.  But images, crops and dropout are functions of counters, and a step that failed
# has left the weights as they were: so its backward passes can be repeated, as the step took them, without the
# all-reduce.


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


CALMER = "lower optim.learning_rate, lengthen schedule.warmup_epochs"
UNTOUCHED = "weights are as before that step"
TRANSIENT = "a passing fault of some rank's memory, device or link; start again, which resumes from the last checkpoint"


class Cause(Struct, frozen=True):
    text: str
    is_an_image: bool  # and not the training


def check_loss(run: "Training", loss: float, step: int, losses: torch.Tensor) -> None:
    """`step` counts from 0, and users from 1; `losses` are those of this rank's microbatches."""
    if math.isfinite(loss):
        return
    found = run.world.all_gather(find_causes(run, step, losses), list[Cause])
    causes = [cause for causes in found for cause in causes]
    cause = causes[0] if causes else Cause("the sum over microbatches is too large; lower optim.learning_rate", False)
    raise (UserError if cause.is_an_image else Diverged)(f"the loss is {loss} at step {step + 1}: {cause.text}")


def find_causes(run: "Training", step: int, losses: torch.Tensor) -> list[Cause]:
    """For each microbatch of this rank whose loss is not finite: which, why, and what helps."""
    rate = f"learning rate {run.learning_rate(step):.4g}"
    remedy = f"{CALMER}, or set optim.clip_norm"
    if run.loss_scale.is_on:
        remedy += "; if activations leave fp16, precision.name=bf16"
    causes = []
    finite = losses.isfinite().tolist()
    for index in [
        index for index, good in zip(run.plan.microbatches_of(run.world.rank), finite, strict=True) if not good
    ]:
        images, _ = run.images.microbatch(step, index)  # position determines data: these are the same
        samples, _ = run.images.samples(step, index)
        bad = samples[~run.normalise(images).isfinite().flatten(1).all(1).cpu().numpy()]
        causes.append(
            Cause(f"microbatch {index} has image {bad[0]} of the training set, which is not finite; fix it", True)
            if len(bad)
            else Cause(f"microbatch {index}, whose images are finite ({rate}); {remedy}", False)
        )
    return causes


def check_gradients(run: "Training", step: int) -> None:
    """After a step whose loss is finite and whose gradients are not: says on which rank, and why."""
    summed = None if run.clip_norm else run.master_weights.first_overflow()  # clipped by a NaN, all are NaN
    bad = find_bad_gradients(run, step)
    if bad:
        first, rate = bad[0], f"learning rate {run.learning_rate(step):.4g}"
        raise Diverged(
            f"the gradient of {first.parameter} is {first.value} at step {step + 1} on {name_ranks(bad)}: microbatch "
            f"{first.microbatch}, whose loss is {first.loss:.4g} ({rate}); {UNTOUCHED}; {CALMER}, or look at a loss, "
            f"a backward or a hook of your own that divides, or takes a root or logarithm"
        )
    name = find_bad_sum(run)
    if name:
        raise Diverged(
            f"the gradient of {name} is finite on every rank at step {step + 1}, but too large for a sum over ranks; "
            f"{UNTOUCHED}; {CALMER}"
        )
    raise NotRepeated(
        f"the gradient of {summed or 'some parameter'} was inf or NaN at step {step + 1}, and is not when every rank "
        f"repeats its part of the step: {TRANSIENT} ({UNTOUCHED})"
    )


def name_ranks(bad: list[BadGradient]) -> str:
    others = len(bad) - 1
    return f"rank {bad[0].rank}" + (f" and {others} other{'s' * (others > 1)}" if others else "")


def check_scale(run: "Training", step: int) -> None:
    """After gradients have overflowed: whether there is any scale left to try."""
    if run.loss_scale.is_exhausted:
        scale, often = show_scale(run.loss_scale.value), run.loss_scale.overflows_in_a_row + 1
        remedy = "leave precision.loss_scale out" if run.loss_scale.kind == "fixed" else "lower optim.learning_rate"
        summed = run.master_weights.first_overflow() or "some parameter"
        bad = find_bad_gradients(run, step)
        where = f" on {name_ranks(bad)} (microbatch {bad[0].microbatch})" if bad else ""
        raise Diverged(
            f"the gradient of {bad[0].parameter if bad else summed} overflows at step {step + 1} with a loss "
            f"scale of {scale}, {often} step{'s' * (often > 1)} in a row{where}; {remedy}, or use bf16 where the "
            "recipe has fp16 or amp"
        )


def check_test_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the test loss is {loss} after step {step + 1}; {CALMER}, or set optim.clip_norm")
