"""The loss, summed over the samples of a microbatch: the trainer divides by the global batch."""

from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from msgspec import Meta, Struct

from megabatch.errors import UserError

SummedLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits, labels) -> the sum over the samples


class LossSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    label_smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0


def summed_loss(settings: LossSettings, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(widened(logits), labels, reduction="sum", label_smoothing=settings.label_smoothing)


def widened(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))  # a sum of exponentials leaves 16 bits


def own_loss(loss: SummedLoss) -> SummedLoss:
    """A user's, of logits in fp32 at least; one that does not sum over the samples is refused, where that is seen."""
    reduction = getattr(loss, "reduction", "sum")
    if reduction != "sum":
        raise UserError(
            f"loss={type(loss).__name__}(reduction={reduction!r}): expected the sum over the samples, which is divided "
            "by the global batch; nearest: reduction='sum'"
        )

    def checked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = loss(widened(logits), labels)
        if not isinstance(found, torch.Tensor) or found.ndim:
            got = f"a tensor {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise UserError(f"loss returned {got}; expected the sum over the samples, a tensor of one number")
        return found

    return checked
