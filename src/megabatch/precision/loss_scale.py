"""Loss scaling: gradients in 16 bits are multiplied by S, so that small ones do not underflow.

The loss is the mean over the global batch, so gradients shrink as the batch G grows, and S starts at 2^8 G.
An overflow halves S, and 100 steps without one double it (a 64K run has only about 1,800).  S is at least 1 and has no
maximum.  A step that overflows is skipped.  Names are those of torch.amp.GradScaler.

S is on the device and is updated there (`update`), so that no step waits for the host.  The host repeats the update
when it reads the step's results (`record`), on an accelerator one step later.
"""

import math
from typing import Literal

import torch

from megabatch.precision.policy import PrecisionSettings
from megabatch.torch_api import unscale_and_find_inf_, update_scale_

INITIAL_SCALE = 2.0**8  # times the global batch
GROWTH_INTERVAL = 100  # steps without an overflow
MIN_SCALE = 1.0
MAX_OVERFLOWS_IN_A_ROW = 20  # with a fixed scale, which does not adapt


class LossScale:
    """The loss scale. It is the same on all ranks, since it depends only on all-reduced gradients."""

    def __init__(
        self, kind: Literal["off", "fixed", "dynamic"], value: float = 1.0, device: torch.device | None = None
    ) -> None:
        self.kind = kind
        self.clean_steps = 0  # since the value changed
        self.overflows_in_a_row = 0
        self.on_device = torch.ones((), device=device)
        self.clean_on_device = torch.zeros((), dtype=torch.int32, device=device)
        self.value = value

    @property
    def value(self) -> float:
        """The scale after the last step that the host has read."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._value = value
        self.on_device.fill_(value)

    @property
    def is_on(self) -> bool:
        return self.kind != "off"

    @property
    def is_exhausted(self) -> bool:
        """Whether another overflow would leave no scale to try."""
        if self.kind == "dynamic":
            return self.value <= MIN_SCALE
        return self.overflows_in_a_row + 1 >= MAX_OVERFLOWS_IN_A_ROW

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.on_device if self.is_on else loss

    @torch.no_grad()
    def unscale(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Unscale gradients in place; return 1 on the device if any was inf or NaN, else 0."""
        overflowed = torch.zeros_like(self.on_device)
        if self.is_on:
            inverse = self.on_device.double().reciprocal().float()
            unscale_and_find_inf_(gradients, overflowed, inverse)
        return overflowed

    @torch.no_grad()
    def update(self, overflowed: torch.Tensor) -> None:
        """Update the scale on the device after a step."""
        if self.kind == "dynamic":
            update_scale_(self.on_device, self.clean_on_device, overflowed, 2.0, 0.5, GROWTH_INTERVAL)
            self.on_device.clamp_(min=MIN_SCALE)

    def record(self, overflowed: bool) -> None:
        """Update the scale on the host when the result of a step was read."""
        self.overflows_in_a_row = self.overflows_in_a_row + 1 if overflowed else 0
        self.clean_steps = 0 if overflowed else self.clean_steps + 1
        if self.kind == "dynamic" and overflowed:
            self._value = max(MIN_SCALE, self._value / 2)
        elif self.kind == "dynamic" and self.clean_steps == GROWTH_INTERVAL:
            self._value, self.clean_steps = 2 * self._value, 0

    def state(self) -> torch.Tensor:
        return torch.tensor([self.value, self.clean_steps, self.overflows_in_a_row], dtype=torch.float64)

    def problem_with(self, state: torch.Tensor, num_steps: int) -> str | None:
        """Return why `state` is not a possible state of this scale after `num_steps`; None if it is."""
        value, *counts = state.tolist()
        if not self.fits(value):
            return f"is {value:g}, which this run cannot reach"
        most = min(num_steps, GROWTH_INTERVAL - 1) if self.kind == "dynamic" else num_steps
        for count, limit in zip(counts, (most, num_steps), strict=True):
            if not (0 <= count <= limit and count == int(count)):
                return f"counts {count:g} steps, expected up to {limit}"
        return None

    def fits(self, value: float) -> bool:
        """Return whether the scale can have this value. On the device it is fp32."""
        if self.kind != "dynamic":
            return value == self.value
        return MIN_SCALE <= value <= torch.finfo(torch.float32).max

    def restore(self, state: torch.Tensor) -> None:
        self.value, clean_steps, overflows = state.tolist()
        self.clean_steps, self.overflows_in_a_row = int(clean_steps), int(overflows)
        self.clean_on_device.fill_(self.clean_steps)


def show_scale(value: float) -> str:
    """Format a scale, large powers of two as 2^20."""
    power = math.log2(value)
    return f"2^{power:.0f}" if power.is_integer() and value > 1000 else f"{value:g}"


def choose_loss_scale(
    settings: PrecisionSettings, is_rounded_to_fp16: bool, global_batch: int, device: torch.device | None = None
) -> LossScale:
    """Return a fixed scale if the settings have one, else a dynamic one if gradients are rounded to fp16, else none."""
    if settings.loss_scale is not None:
        return LossScale("fixed", settings.loss_scale, device)
    if is_rounded_to_fp16:
        return LossScale("dynamic", INITIAL_SCALE * global_batch, device)
    return LossScale("off", device=device)
