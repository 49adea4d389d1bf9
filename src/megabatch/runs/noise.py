"""The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A).

Legend: g_i is the mean gradient of microbatch i of a step, n microbatches of m samples, G their mean; signal is the
    square of the true gradient, trace that of the covariance of the gradient of one sample.
Idea: E |g_i|^2 = signal + trace / m, and E |G|^2 = signal + trace / (m n).  From both squares follow estimates without
    bias:

        signal = (n |G|^2 - mean |g_i|^2) / (n - 1)        trace = m n (mean |g_i|^2 - |G|^2) / (n - 1)

    The noise scale is B = trace / signal.  At a batch of B samples, noise and gradient are equally large, and training
    needs twice the epochs of a small batch: a batch b needs 1 + b / B times as many.  A ratio of two noisy values is
    biased, so trace and signal are averaged over steps before they are divided.
Interval: of the ratio of two means (Fieller 1954).  It has no upper bound if the signal may be 0.
"""

import math

from msgspec import Struct, field

from megabatch.runs.records import Amount, NoiseRecord

DECAY = 0.9  # of a measured step's weight with each later one: averages of up to 19 steps
FEWEST_STEPS = 3.5  # for an interval, weighted: the fourth measured step is the first with one
LARGEST = 1e15
NORMAL_975 = 1.959963984540054
ONE_MICROBATCH = "a step has one microbatch, and its noise is the difference of several; make batch.micro smaller"
OVERFLOWED = "gradients overflowed"
NO_SIGNAL = "the noise hides the gradient"


def noise_record(sum_of_squares: float, square_of_sum: float, num_microbatches: int, samples: int) -> NoiseRecord:
    """Return the estimates of a step, without averages.

    Args:
        sum_of_squares: The sum over microbatches of |h_i|^2, with h_i = g_i / n, the contribution of a microbatch to G.
        square_of_sum: |G|^2.
        num_microbatches: n, at least 2.
        samples: m.
    """
    if not math.isfinite(sum_of_squares + square_of_sum):
        return NoiseRecord(reason=OVERFLOWED)
    mean_of_squares = num_microbatches * sum_of_squares
    signal = (num_microbatches * square_of_sum - mean_of_squares) / (num_microbatches - 1)
    trace = samples * num_microbatches * (mean_of_squares - square_of_sum) / (num_microbatches - 1)
    return NoiseRecord(signal=signal, trace=trace)


class Progress(Struct, kw_only=True):
    """The critical batch of steps: the mean of B over their progress.

    A step at batch b makes 1 / (1 + B / b) of the progress of a step without noise.  If all progress needs S of those,
    batch b needs S (1 + mean B / b) steps, in which the mean is over progress.
    """

    made: Amount = 0.0
    times_scale: Amount = 0.0  # the sum of progress x B

    def add(self, scale: float | None, batch: int) -> None:
        """Add a step; None is an infinite scale, at which progress x B is b."""
        progress = 0.0 if scale is None else 1 / (1 + scale / batch)
        self.made += progress
        self.times_scale += batch if scale is None else progress * scale

    @property
    def critical(self) -> float | None:
        return within(self.times_scale / self.made) if self.made > 0 else None


class NoiseAverage(Struct, kw_only=True):
    """Weighted sums over measured steps of signal x, trace y and their products."""

    weight: Amount = 0.0
    weight_squared: Amount = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    over_run: Progress = field(default_factory=Progress)
    over_run_low: Progress = field(default_factory=Progress)
    over_run_high: Progress = field(default_factory=Progress)

    def add(self, record: NoiseRecord, batch: int) -> NoiseRecord:
        """Add a step, and return its record with the averages so far."""
        x, y = record.signal, record.trace
        if x is None or y is None:
            return record
        new = {"x": x, "y": y, "xx": x * x, "xy": x * y, "yy": y * y, "weight": 1.0}
        for name, value in new.items():
            setattr(self, name, DECAY * getattr(self, name) + value)
        self.weight_squared = DECAY * DECAY * self.weight_squared + 1.0
        scale, (low, high) = self.scale, self.interval()
        self.over_run.add(scale, batch)
        self.over_run_low.add(scale if low is None else low, batch)
        self.over_run_high.add(scale if low is None else high, batch)
        return NoiseRecord(
            signal=x,
            trace=y,
            scale=scale,
            low=low,
            high=high,
            over_run=self.over_run.critical,
            over_run_low=None if low is None else self.over_run_low.critical,
            over_run_high=None if low is None else self.over_run_high.critical,
            reason=NO_SIGNAL if scale is None else None,
        )

    @property
    def scale(self) -> float | None:
        """B = trace / signal; None if the mean signal is not positive."""
        return within(self.y / self.x) if self.x > 0 else None

    def interval(self) -> tuple[float | None, float | None]:
        """Return the bounds of B with 95 % confidence.  None: not known, or no upper bound."""
        steps = self.weight * self.weight / self.weight_squared
        if steps < FEWEST_STEPS:
            return None, None
        x, y = self.x / self.weight, self.y / self.weight
        t = student_t(steps - 1)
        # Variances of the means, times t^2.
        xx, xy, yy = (
            t * t * (total / self.weight - mean) / (steps - 1)
            for total, mean in ((self.xx, x * x), (self.xy, x * y), (self.yy, y * y))
        )
        # The bounds solve (y - B x)^2 = t^2 var(y - B x), which is a B^2 - 2 b B + c = 0.
        a, b, c = x * x - max(0.0, xx), x * y - xy, y * y - max(0.0, yy)
        root = math.sqrt(max(0.0, b * b - a * c))
        if a == 0 or (a < 0 and c <= 0):
            return 0.0, None
        return within((b - root) / a), within((b + root) / a) if a > 0 else None


def within(scale: float) -> float:
    """Return the nearest value that a file may have.  A mean trace below 0 does not differ from 0."""
    return min(LARGEST, max(0.0, scale))


def student_t(degrees: float) -> float:
    """Approximate `intervals.student_t` within 1 % from 3 degrees on, without the import of scipy during a run."""
    z, v = NORMAL_975, degrees
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def describe_noise(noise: NoiseRecord) -> str:
    """Return one line for a person."""
    if noise.scale is None or noise.over_run is None:
        return f"not known: {noise.reason or NO_SIGNAL}"
    critical = round_off(noise.over_run)
    return (
        f"scale {round_off(noise.scale)}{describe_bounds(noise.low, noise.high)} at the end, "
        f"{critical}{describe_bounds(noise.over_run_low, noise.over_run_high)} over the run: a batch of up to about "
        f"{round_off(noise.over_run / 5)} needs few extra epochs here, {critical} needs twice as many"
    )


def describe_bounds(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f" ({round_off(low)} to {round_off(high) if high is not None else 'any size'})"


def round_off(value: float) -> str:
    """Format with two significant digits: 1,834 is 1,800."""
    if value < 1:
        return f"{value:.1g}"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.0f}"
