"""How many epochs a batch needs to reach an accuracy (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).

Legend: E epochs at batch B, E_min those of a small batch; at the critical batch B_crit training needs twice as many.

    E(B) = E_min (1 + B / B_crit)

Fit: least squares of the relative errors, with both parameters at least 0.  The misfit is the standard deviation of a
run from the curve: that of a batch's mean, with two degrees of freedom fewer than there are batches, and that of runs
of one batch from their mean.  It widens every interval, as does a batch beyond the known ones.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from megabatch.errors import UserError

FEWEST_BATCHES = 3
DEVIATIONS = 1.64  # nine in ten are within
LEAST_DOUBT, MOST_DOUBT = 0.1, 1.0  # relative, of epochs by the noise scale
BEYOND = 0.15  # more uncertainty per factor e beyond the known batches


class EpochPoint(NamedTuple):
    batch: int
    epochs: float


class EpochCurve(Struct, frozen=True, kw_only=True):
    source: str  # for people
    fewest: float  # E_min
    critical: float  # B_crit; inf: no known batch costs more epochs
    misfit: float  # relative
    smallest: int  # known batch
    largest: int

    def epochs(self, batch: float) -> float:
        return self.fewest * (1 + batch / self.critical)

    def doubt(self, batch: float) -> float:
        """Return the relative uncertainty of `epochs`."""
        distance = max(0.0, math.log(batch / self.largest), math.log(self.smallest / batch) - math.log(8))
        return DEVIATIONS * self.misfit + BEYOND * distance


def fit_epochs(points: Sequence[EpochPoint], source: str) -> EpochCurve:
    batches = sorted({point.batch for point in points})
    if len(batches) < FEWEST_BATCHES:
        raise UserError(
            f"{source} has {len(batches)} batch{'es' * (len(batches) != 1)} that reached the target; a curve needs at "
            f"least {FEWEST_BATCHES}; train at more batches, or lower the target"
        )
    # E / e = a u + b v with u = 1 / e, v = B / e: the relative errors are a u + b v - 1.
    u = [1 / point.epochs for point in points]
    v = [point.batch / point.epochs for point in points]
    uu, uv, vv = (math.fsum(x * y for x, y in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    su, sv = math.fsum(u), math.fsum(v)
    determinant = uu * vv - uv * uv
    fewest, slope = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
    if slope <= 0:  # larger batches needed no more epochs
        fewest, slope = su / uu, 0.0
    elif fewest <= 0:
        raise UserError(
            f"{source}: epochs grow faster than the batch, and all batches are beyond the critical one; train at "
            "smaller batches too"
        )
    errors = {
        batch: [(fewest + slope * batch) / point.epochs - 1 for point in points if point.batch == batch]
        for batch in batches
    }
    means = {batch: math.fsum(group) / len(group) for batch, group in errors.items()}
    of_batches = math.fsum(mean * mean for mean in means.values()) / (len(batches) - 2)
    of_runs = math.fsum((error - means[batch]) ** 2 for batch, group in errors.items() for error in group)
    misfit = math.sqrt(of_batches + of_runs / max(1, len(points) - len(batches)))
    return EpochCurve(
        source=source,
        fewest=fewest,
        critical=fewest / slope if slope else math.inf,
        misfit=misfit,
        smallest=batches[0],
        largest=batches[-1],
    )


def curve_of_noise(
    source: str, batch: int, epochs: float, critical: float, low: float | None, high: float | None
) -> EpochCurve:
    """Return the curve through one run, whose noise scale gives the critical batch with its interval.

    At the critical batch, half of the epochs follow from the noise scale, so they are half as uncertain.
    """
    assert critical > 0
    doubt = math.log(high / low) / 4 if low and high else MOST_DOUBT
    return EpochCurve(
        source=source,
        fewest=epochs / (1 + batch / critical),
        critical=critical,
        misfit=min(max(doubt, LEAST_DOUBT), MOST_DOUBT) / DEVIATIONS,
        smallest=batch,
        largest=max(batch, round(critical)),
    )
