"""Where inf and NaN end a run: what is said, and what it is found from.

Losses and sums of gradients are the same on all ranks, so all ranks end here together, after the same step.  The last
checkpoint stays: none is ever written with inf or NaN in it.
"""

import math
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from megabatch.errors import Diverged, UserError
from megabatch.precision.loss_scale import show_scale

if TYPE_CHECKING:
    from megabatch.train.loop import Training


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
    remedy = "lower optim.learning_rate, lengthen schedule.warmup_epochs, or set optim.clip_norm"
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


def check_scale(run: "Training", step: int) -> None:
    """After gradients have overflowed: whether there is any scale left to try."""
    if run.loss_scale.is_exhausted:
        scale, often = show_scale(run.loss_scale.value), run.loss_scale.overflows_in_a_row + 1
        remedy = "leave precision.loss_scale out" if run.loss_scale.kind == "fixed" else "lower optim.learning_rate"
        name = run.master_weights.first_overflow() or "some parameter"
        raise Diverged(
            f"the gradient of {name} overflows at step {step + 1} with a loss scale of {scale}, "
            f"{often} step{'s' * (often > 1)} in a row; {remedy}, or use bf16 where the recipe has fp16 or amp"
        )


def check_test_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise Diverged(
            f"the test loss is {loss} after step {step + 1}; lower optim.learning_rate, lengthen "
            "schedule.warmup_epochs, or set optim.clip_norm"
        )
