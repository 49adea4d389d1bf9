"""The curve of epochs against batch, fitted to epochs that are known."""

import math
from random import Random

import pytest

from megabatch.config.reference_results import epoch_points
from megabatch.data.sources.shapes import IMAGENET
from megabatch.errors import UserError
from megabatch.planning.epochs import EpochPoint, curve_of_noise, fit_epochs

BATCHES = (64, 256, 1024, 4096, 16_384)


def points(fewest: float, critical: float, noise: float = 0.0, seed: int = 1) -> list[EpochPoint]:
    random = Random(seed)
    return [EpochPoint(b, fewest * (1 + b / critical) * random.gauss(1, noise)) for b in BATCHES]


def test_exact_points_give_the_curve_back() -> None:
    curve = fit_epochs(points(12, 3000), "made up")
    assert (curve.fewest, curve.critical, curve.misfit) == pytest.approx((12, 3000, 0), abs=1e-9)
    assert curve.epochs(3000) == pytest.approx(24)


def test_noisy_points_give_a_misfit_of_their_size() -> None:
    curve = fit_epochs([point for seed in range(40) for point in points(12, 3000, 0.05, seed)], "made up")
    assert curve.misfit == pytest.approx(0.05, rel=0.2) and curve.critical == pytest.approx(3000, rel=0.1)
    assert curve.doubt(64) == curve.doubt(16_384) < curve.doubt(4 * 16_384)


def test_seeds_of_a_batch_do_not_hide_that_its_mean_is_off_the_curve() -> None:
    once = [EpochPoint(batch, epochs) for batch, epochs in zip(BATCHES, (12, 14, 13, 16, 60), strict=True)]
    few, many = fit_epochs(once, "made up"), fit_epochs(20 * once, "made up")
    assert few.misfit > 0.03 and many.misfit == pytest.approx(few.misfit)


def test_epochs_that_do_not_grow_give_no_critical_batch() -> None:
    curve = fit_epochs([EpochPoint(batch, 12 - 0.1 * place) for place, batch in enumerate(BATCHES)], "made up")
    assert math.isinf(curve.critical) and 11.5 < curve.epochs(10**5) < 12


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (points(12, 3000)[:2], "has 2 batches .* at least 3"),
        ([EpochPoint(batch, batch**1.5) for batch in BATCHES], "train at smaller batches"),
    ],
)
def test_curves_that_cannot_be_fitted_are_rejected(given: list[EpochPoint], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        fit_epochs(given, "made up")


def test_noise_scale_gives_the_curve_through_one_run() -> None:
    curve = curve_of_noise("a run", 64, 10.0, 640.0, 400.0, 1600.0)
    assert curve.epochs(64) == pytest.approx(10) and curve.epochs(640) == pytest.approx(10 / 1.1 * 2)
    assert curve.doubt(64) == pytest.approx(math.log(4) / 4)


@pytest.mark.parametrize(("low", "high", "doubt"), [(600.0, 680.0, 0.1), (400.0, None, 1.0), (0.0, 700.0, 1.0)])
def test_doubt_of_a_noise_scale_has_bounds(low: float, high: float | None, doubt: float) -> None:
    assert curve_of_noise("a run", 64, 10.0, 640.0, low, high).doubt(64) == pytest.approx(doubt)


def test_reference_points_of_mlperf_fit_the_curve() -> None:
    curve = fit_epochs(epoch_points("resnet50", IMAGENET.num_train), "MLPerf")
    assert 33 < curve.fewest < 38 and 40_000 < curve.critical < 60_000 and curve.misfit < 0.08
