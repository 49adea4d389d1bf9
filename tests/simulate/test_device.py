import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.simulate.device import Curve, Point, fit_curve


def points(variant: str, fixed_ms: float, per_image_ms: float, *batches: float) -> tuple[Point, ...]:
    return tuple(
        Point(batch=batch, images_per_s=1e3 * batch / (fixed_ms + per_image_ms * batch), variant=variant)
        for batch in batches
    )


@given(st.integers(0, 399), st.floats(0.01, 10))
def test_a_curve_is_found_again_in_its_own_points(quarters: int, per_image_ms: float) -> None:
    fixed_ms = quarters / 4 * per_image_ms
    found = fit_curve(Curve(points=points("", fixed_ms, per_image_ms, 16, 64, 256)))
    assert 1e3 * found.line.fixed_s == pytest.approx(fixed_ms, rel=1e-6, abs=1e-9)
    assert 1e3 * found.line.per_image_s == pytest.approx(per_image_ms)


def test_batches_of_one_variant_speak_for_another() -> None:
    """A slow card at a small batch is not taken for a large t0."""
    fast, slow = points("80GB", 4, 0.29, 408), points("40GB", 4 * 1.1, 0.29 * 1.1, 204, 408)
    found = fit_curve(Curve(points=(*fast, *slow)), "80GB")
    assert 1e3 * found.line.seconds(51) == pytest.approx(4 + 0.29 * 51, rel=0.02)


def test_the_spread_is_that_of_the_machines() -> None:
    draw = random.Random(1)
    noisy = tuple(
        Point(batch=point.batch, images_per_s=point.images_per_s * math.exp(draw.gauss(0, 0.05)))
        for point in points("", 4, 0.3, *(16, 64, 256) * 40)
    )
    assert fit_curve(Curve(points=noisy)).spread == pytest.approx(0.05, rel=0.2)


def test_points_without_a_variant_serve_all() -> None:
    curve = Curve(points=points("", 4, 0.3, 16, 64))
    assert fit_curve(curve, "any") == fit_curve(curve)


def test_one_batch_does_not_tell_what_another_costs() -> None:
    alone = points("", 4, 0.3, 256)
    with pytest.raises(UserError, match="fixed_images"):
        fit_curve(Curve(points=alone))
    found = fit_curve(Curve(points=alone, fixed_images=4 / 0.3))
    assert 1e3 * found.line.seconds(16) == pytest.approx(4 + 0.3 * 16)


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(UserError, match="'90GB' is none of 80GB; nearest: 80GB"):
        fit_curve(Curve(points=points("80GB", 4, 0.3, 16, 64)), "90GB")


def test_large_batches_do_not_tell_what_small_ones_cost() -> None:
    draw = random.Random(2)
    near, far = (
        Curve(
            points=tuple(
                Point(batch=point.batch, images_per_s=point.images_per_s * math.exp(draw.gauss(0, 0.03)))
                for point in points("", 4, 0.3, *batches * 8)
            )
        )
        for batches in ((16, 400), (400, 800))
    )
    assert fit_curve(far).doubt(16) > 3 * fit_curve(near).doubt(16)
    assert fit_curve(far).doubt(600) < 0.05


def test_what_a_step_has_waited_is_not_the_devices() -> None:
    waited = tuple(
        Point(batch=point.batch, images_per_s=1e3 * point.batch / (1e3 * point.seconds + 2), waited_ms=2)
        for point in points("", 4, 0.3, 16, 64, 256)
    )
    assert 1e3 * fit_curve(Curve(points=waited)).line.seconds(32) == pytest.approx(4 + 0.3 * 32, rel=1e-3)
    with pytest.raises(UserError, match="longer than it waited"):
        Curve(points=(Point(batch=1, images_per_s=1000, waited_ms=2),))
