"""Loss scaling: gradients times S on their way through 16 bits, so that the small ones do not vanish.

The loss is the mean over the global batch, so a gradient shrinks as the batch G grows, and S starts at 2^8 G.
An overflow halves S, 100 steps without one double it (a 64K run has only about 1,800); it has no maximum, and is at
least 1.  A step that overflows is skipped.  Names as in torch.amp.GradScaler.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from megabatch.precision.policy import PrecisionSettings

INITIAL_SCALE = 2.0**8  # times the global batch
GROWTH_INTERVAL = 100  # steps without an overflow
MIN_SCALE = 1.0
MAX_OVERFLOWS_IN_A_ROW = 20  # of a fixed scale, which will not get better


@dataclass
class LossScale:
    """The same on all ranks, since it follows from the all-reduced gradients."""

    kind: Literal["off", "fixed", "dynamic"]
    value: float = 1.0
    clean_steps: int = 0  # since the value changed
    overflows_in_a_row: int = 0

    @property
    def is_on(self) -> bool:
        return self.kind != "off"

    @property
    def is_exhausted(self) -> bool:
        """After another overflow there would be no scale left to try."""
        if self.kind == "dynamic":
            return self.value <= MIN_SCALE
        return self.overflows_in_a_row + 1 >= MAX_OVERFLOWS_IN_A_ROW

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value if self.is_on else loss

    def update(self, overflowed: bool) -> None:
        """Call it after each step."""
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if overflowed else 0
        self.clean_steps = 0 if overflowed else self.clean_steps + 1
        if self.kind == "dynamic" and overflowed:
            self.value = max(MIN_SCALE, self.value / 2)
        elif self.kind == "dynamic" and self.clean_steps == GROWTH_INTERVAL:
            self.value, self.clean_steps = 2 * self.value, 0

    def state(self) -> torch.Tensor:
        return torch.tensor([self.value, self.clean_steps, self.overflows_in_a_row], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        self.value, clean_steps, overflows = state.tolist()
        self.clean_steps, self.overflows_in_a_row = int(clean_steps), int(overflows)


def show_scale(value: float) -> str:
    """2^20 rather than 1.04858e+06."""
    power = math.log2(value)
    return f"2^{power:.0f}" if power.is_integer() and value > 1000 else f"{value:g}"


def choose_loss_scale(settings: PrecisionSettings, is_rounded_to_fp16: bool, global_batch: int) -> LossScale:
    """`is_rounded_to_fp16`: gradients are, somewhere on their way to the update."""
    if settings.loss_scale is not None:
        return LossScale("fixed", settings.loss_scale)
    return LossScale("dynamic", INITIAL_SCALE * global_batch) if is_rounded_to_fp16 else LossScale("off")
