import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.simulate.device import EXTRAPOLATION, USUAL, Curve, ThroughputPoint, fit_curve


def points(variant: str, fixed_ms: float, per_image_ms: float, *batches: float) -> tuple[ThroughputPoint, ...]:
    return tuple(
        ThroughputPoint(batch=batch, images_per_s=1e3 * batch / (fixed_ms + per_image_ms * batch), variant=variant)
        for batch in batches
    )


@given(st.integers(8, 200), st.floats(0.01, 10))
def test_fit_recovers_the_line_of_exact_points(quarters: int, per_image_ms: float) -> None:
    fixed_ms = quarters / 4 * per_image_ms
    found = fit_curve(Curve(points=points("", fixed_ms, per_image_ms, *(2, 16, 64, 256) * 10)))
    assert 1e3 * found.line.fixed_s == pytest.approx(fixed_ms, rel=0.01)
    assert 1e3 * found.line.per_image_s == pytest.approx(per_image_ms, rel=0.01)


def test_variants_share_the_fixed_time() -> None:
    """A slow card at a small batch is not mistaken for a large t0."""
    fast, slow = points("80GB", 4, 0.29, 408), points("40GB", 4 * 1.1, 0.29 * 1.1, 204, 408)
    found = fit_curve(Curve(points=(*fast, *slow)), "80GB")
    assert 1e3 * found.line.seconds(51) == pytest.approx(4 + 0.29 * 51, rel=0.04)


def test_spread_is_the_deviation_of_machines() -> None:
    draw = random.Random(1)
    noisy = tuple(
        ThroughputPoint(batch=point.batch, images_per_s=point.images_per_s * math.exp(draw.gauss(0, 0.05)))
        for point in points("", 4, 0.3, *(16, 64, 256) * 40)
    )
    assert fit_curve(Curve(points=noisy)).spread == pytest.approx(0.05, rel=0.2)


def test_points_without_a_variant_apply_to_all() -> None:
    curve = Curve(points=points("", 4, 0.3, 16, 64))
    assert fit_curve(curve, "any") == fit_curve(curve)


def test_one_batch_takes_the_prior() -> None:
    alone = points("", 4, 0.3, 256)
    found, usual = fit_curve(Curve(points=alone, fixed_ms=4)), fit_curve(Curve(points=alone))
    assert 1e3 * found.line.seconds(16) == pytest.approx(4 + 0.3 * 16)
    assert usual.line.fixed_s / usual.line.per_image_s == pytest.approx(USUAL)
    assert usual.doubt(16) > 2 * found.doubt(16)


@pytest.mark.parametrize("gain", [0.96, 1.0, 1.04])
def test_two_large_batches_do_not_make_small_ones_free(gain: float) -> None:
    """Noise hides t0 at large batches: the same images/s at twice the batch do not prove that launches are free."""
    pair = (ThroughputPoint(batch=256, images_per_s=7000), ThroughputPoint(batch=512, images_per_s=7000 * gain))
    found = fit_curve(Curve(points=pair))
    assert 8 / found.line.seconds(8) < 0.6 * 7000 and found.line.seconds(256) == pytest.approx(256 / 7000, rel=0.04)


def test_prior_and_points_share_the_decision() -> None:
    """Points of one batch leave the prior as it is; a point at a small batch outweighs it."""
    large, small = points("", 4, 0.3, 256, 400), points("", 4, 0.3, *[8] * 20)
    vague, certain = (fit_curve(Curve(points=given, fixed_ms=8)) for given in (large, (*large, *small)))
    assert 4 < 1e3 * vague.line.fixed_s < 8
    assert 1e3 * certain.line.fixed_s == pytest.approx(4, rel=0.02)
    assert certain.doubt(8) < vague.doubt(8)


def test_doubt_grows_outside_the_range_of_the_points() -> None:
    exact = fit_curve(Curve(points=points("", 4, 0.3, *[16, 400] * 50)))
    inside, below, above = (exact.doubt(batch) for batch in (16, 16 / math.e, 400 * math.e))
    assert inside < 0.02 < EXTRAPOLATION <= min(below, above)
    assert exact.doubt(1) > below


def test_unknown_variant_error_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="'90GB' is not one of 80GB; nearest: 80GB"):
        fit_curve(Curve(points=points("80GB", 4, 0.3, 16, 64)), "90GB")


def test_large_batches_leave_small_ones_uncertain() -> None:
    draw = random.Random(2)
    near, far = (
        Curve(
            points=tuple(
                ThroughputPoint(batch=point.batch, images_per_s=point.images_per_s * math.exp(draw.gauss(0, 0.03)))
                for point in points("", 4, 0.3, *batches * 8)
            )
        )
        for batches in ((16, 400), (400, 800))
    )
    assert fit_curve(far).doubt(16) > 3 * fit_curve(near).doubt(16)
    assert fit_curve(far).doubt(600) < 0.05


def test_waiting_is_not_part_of_the_devices_time() -> None:
    waited = tuple(
        ThroughputPoint(batch=point.batch, images_per_s=1e3 * point.batch / (1e3 * point.seconds + 2), waited_ms=2)
        for point in points("", 4, 0.3, 16, 64, 256)
    )
    assert 1e3 * fit_curve(Curve(points=waited)).line.seconds(32) == pytest.approx(4 + 0.3 * 32, rel=1e-3)
    with pytest.raises(UserError, match="waited_ms"):
        Curve(points=(ThroughputPoint(batch=1, images_per_s=1000, waited_ms=2),))
