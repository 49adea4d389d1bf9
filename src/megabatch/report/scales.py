"""Axes: which part of the numbers a chart shows, and round numbers along it."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megabatch.report import figures
from megabatch.report.thin import finite

CLIP = 4.0  # times what nearly all values stay below: more is a spike, which would flatten the rest
NEARLY_ALL = 0.98
LARGEST = 1e290  # beyond which numbers are taken for it
ALIKE = 1e-9


class Scale(NamedTuple):
    """From `low` to `high`; ticks with their labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """How far along it a value is, from 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def nice_step(length: float, most: int) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that divides a length into at most so many parts."""
    raw = length / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= raw * 0.999999)


def scale_of(
    values: Sequence[float],
    *,
    most_ticks: int = 5,
    zero: bool = False,
    clip: bool = False,
    label: Callable[[float], str] = figures.number,
) -> Scale:
    """Over all values that are numbers.  `zero`: from 0 on.  `clip`: without the spikes."""
    known = [min(max(value, -LARGEST), LARGEST) for value in finite(values)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if clip:
        usual = sorted(known)[int(NEARLY_ALL * (len(known) - 1))]
        high = max(low, min(high, CLIP * usual)) if usual > 0 else high
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    largest = max(abs(low), abs(high))
    if high - low <= max(ALIKE * largest, 1 / LARGEST):  # no two ticks would differ
        around = 0.1 * largest if largest > 1 / LARGEST else 0.5
        low, high = low - around if low < 0 else max(0.0, low - around), high + around
    step = nice_step(high - low, most_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [place * step for place in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], [(tick, label(tick)) for tick in ticks])


def along(low: float, high: float, label: Callable[[float], str] = figures.count, most_ticks: int = 5) -> Scale:
    """An x axis: it ends where the data end, and only its ticks are round."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        high = low + 1.0
    step = nice_step(high - low, most_ticks)
    if label is figures.count:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, [(place * step, label(place * step)) for place in range(first, last + 1)])


TIME_STEPS_S = (
    *(factor * 10.0**power for power in range(-6, 1) for factor in (1, 2, 5)),
    *(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800),
)


def along_time(end_s: float, most_ticks: int = 5) -> Scale:
    """Wall time, with ticks at round times."""
    if not math.isfinite(end_s) or end_s <= 0:
        end_s = 1.0
    step = next((s for s in TIME_STEPS_S if end_s / s <= most_ticks), 0.0) or nice_step(end_s, most_ticks)
    return Scale(0.0, end_s, [(place * step, short_time(place * step, step)) for place in range(int(end_s / step) + 1)])


def up_to_time(high_s: float, most_ticks: int = 4) -> Scale:
    """A y axis of times, from 0 to the next tick above."""
    scale = along_time(high_s, most_ticks)
    step = scale.ticks[1][0] if len(scale.ticks) > 1 else high_s or 1.0
    count = max(1, math.ceil(high_s / step - 1e-9))
    return Scale(0.0, count * step, [(place * step, short_time(place * step, step)) for place in range(count + 1)])


def short_time(value_s: float, step_s: float) -> str:
    """0, 30 s, 5 min, 1:30 h, 2 d: no longer than a tick's label may be."""
    if value_s == 0:
        return "0"
    if step_s < 1:
        return (
            f"{figures.number(value_s)} s"
            if value_s >= 1
            else f"{figures.number(1e3 * value_s)} ms"
            if value_s >= 1e-3
            else f"{figures.number(1e6 * value_s)} us"
        )
    if step_s < 60:
        return f"{value_s:,.0f} s"
    if step_s < 3600:
        hours, minutes = divmod(round(value_s / 60), 60)
        return f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"
    if step_s < 86_400:
        return f"{value_s / 3600:,.0f} h"
    return f"{value_s / 86_400:,.0f} d"


def along_powers(values: Sequence[float]) -> Scale:
    """A loss scale: in powers of two, with their exponents as values."""
    known = [value for value in finite(values) if value > 0] or [1.0]
    low, high = math.floor(math.log2(min(known))), math.ceil(math.log2(max(known)))
    if high - low < 2:
        low, high = low - 1, high + 1
    step = max(1, round(nice_step(high - low, 4)))
    ticks = list(range(low - low % step, high + step, step))
    return Scale(ticks[0], ticks[-1], [(tick, f"2^{tick}") for tick in ticks])
