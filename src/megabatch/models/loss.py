"""The loss, summed over the samples of a microbatch: the trainer divides by the global batch.

With class weights it still divides by the global batch.  torch's mean divides by the sum of the batch's weights, so its
result would depend on the samples that share a microbatch.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta, Struct

from megabatch.errors import LONGEST_QUOTED, UserError, nearest
from megabatch.text import one_line

# (logits, labels) -> the sum over the samples.  Labels are class numbers, [B], or targets, [B, classes].
SummedLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


Weight = Annotated[float, Meta(gt=0, le=1e6)]


class LossSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    label_smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    target_threshold: Annotated[float, Meta(ge=0, lt=1)] | None = None  # bce: targets above it are 1, others 0
    class_weights: Literal["auto"] | dict[str, Weight] | None = None  # by name; classes that are not named have 1

    def __post_init__(self) -> None:
        if self.target_threshold is not None and self.name != "bce":
            raise UserError(
                f"loss.target_threshold={self.target_threshold:g} with loss.name={self.name}: only bce has a target of "
                "0 or 1 for each class; leave it out, or set loss.name=bce"
            )


def class_weights(
    settings: LossSettings, names: Sequence[str], counts: Sequence[int], total: int
) -> list[float] | None:
    """Return the weight of each class, or None without class weights.

    `auto` gives every class the same weight in total.  For cross-entropy it is N / (K n) for a class with n of the N
    images, K classes having images: scikit-learn's "balanced".  The mean over the images is 1, so learning rates keep
    their meaning.  For bce it is (N - n) / n, the weight of the positive targets.

    Args:
        settings: The loss.
        names: The names of the classes.
        counts: The training images of each class.
        total: The training images.
    """
    given = settings.class_weights
    if given is None:
        return None
    if given == "auto":
        present = sum(count > 0 for count in counts)
        if settings.name == "bce":
            return [(total - count) / count if 0 < count < total else 1.0 for count in counts]
        return [total / (present * count) if count else 1.0 for count in counts]
    assert isinstance(given, dict)
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        shown = one_line(unknown, LONGEST_QUOTED)
        raise UserError(
            f"loss.class_weights: the data set has no class {shown!r}; nearest: {nearest(unknown, names)!r}"
        )
    return [given.get(name, 1.0) for name in names]


def summed_loss(
    settings: LossSettings, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss.  `weights` has that of each class, [classes], of positive targets with bce."""
    logits, smoothing = to_at_least_fp32(logits), settings.label_smoothing
    if settings.name == "bce":
        targets = smoothed(logits, labels, smoothing)
        if settings.target_threshold is not None:
            targets = (targets > settings.target_threshold).to(targets.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum", pos_weight=weights)
    return F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=smoothing)


def smoothed(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the target of each class: its share of the smoothing, and for the label the rest as well.

    Labels may already be targets, [B, classes].
    """
    if labels.ndim == 2:
        return labels * (1.0 - smoothing) + smoothing / logits.shape[1]
    targets = torch.full_like(logits, smoothing / logits.shape[1])
    return targets.scatter_add_(1, labels[:, None], torch.full_like(logits[:, :1], 1.0 - smoothing))


def to_at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))  # a sum of exponentials overflows 16 bits


def wrap_user_loss(loss: SummedLoss) -> SummedLoss:
    """Wrap a custom loss, which gets logits in at least fp32.  Raise if it is known not to sum over the samples."""
    reduction = getattr(loss, "reduction", "sum")
    if reduction != "sum":
        raise UserError(
            f"loss={type(loss).__name__}(reduction={reduction!r}): expected the sum over the samples, which is divided "
            "by the global batch; nearest: reduction='sum'"
        )

    def checked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = loss(to_at_least_fp32(logits), labels)
        if not isinstance(found, torch.Tensor) or found.ndim:
            got = f"a tensor {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise UserError(f"loss returned {got}; expected the sum over the samples, a tensor of one number")
        return found

    return checked
