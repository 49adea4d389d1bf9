"""Learning rates, as pure functions of the step.

The learning rate rises linearly over the warm-up, then decays from its peak to `end`.  `progress` runs from 0 at the
first step after the warm-up to 1 one step past the last, so no step is wasted on a learning rate of zero.
Goyal et al. 2017 (linear warm-up); You et al. 2017 (poly, power 2).
"""

import math
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from megabatch.errors import require_one_of

NonNegative = Annotated[float, Meta(ge=0, le=10**6)]


def poly(progress: float, power: float) -> float:
    return float((1.0 - progress) ** power)


def cosine(progress: float, power: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def constant(progress: float, power: float) -> float:
    return 1.0


DECAYS = {"poly": poly, "cosine": cosine, "constant": constant}


class ScheduleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warmup_epochs: NonNegative = 0.0
    decay: str = "poly"
    power: Annotated[float, Meta(gt=0, le=20)] = 2.0  # of `poly`; other decays ignore it
    end: NonNegative = 0.0  # the learning rate at the end of the decay

    def __post_init__(self) -> None:
        require_one_of("schedule.decay", self.decay, DECAYS)


def schedule(settings: ScheduleSettings, peak: float, warmup_steps: int, num_steps: int) -> Callable[[float], float]:
    """Return the learning rate as a function of the step, counted from 0."""
    decay = DECAYS[settings.decay]

    def learning_rate(step: float) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        progress = (step - warmup_steps) / (num_steps - warmup_steps)
        return settings.end + (peak - settings.end) * decay(progress, settings.power)

    return learning_rate
