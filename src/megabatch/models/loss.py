"""The loss, summed over the samples of a microbatch: the trainer divides by the global batch."""

from typing import Annotated

import torch
import torch.nn.functional as F
from msgspec import Meta, Struct


class LossSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    label_smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0


def summed_loss(settings: LossSettings, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a sum of exponentials leaves 16 bits
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=settings.label_smoothing)
