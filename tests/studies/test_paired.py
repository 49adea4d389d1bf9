import random

import pytest

from megabatch.studies.paired import paired_gap
from megabatch.studies.statistics import gap


def test_by_hand() -> None:
    """Differences 0.1, 0.3, 0.2: a mean of 0.2, a deviation of 0.1, and t(2) = 4.303."""
    found = paired_gap({1: 92.9, 2: 91.7, 3: 94.8}, {1: 93.0, 2: 92.0, 3: 95.0})
    assert found and found.interval and found.size == pytest.approx(0.2)
    assert found.interval.high - found.size == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)


def test_what_a_seed_does_to_both_arms_falls_out() -> None:
    rng = random.Random(1)
    shared = {seed: 90 + 3 * rng.random() for seed in range(8)}
    arm = {seed: value - 0.2 + 0.01 * rng.random() for seed, value in shared.items()}
    paired, apart = paired_gap(arm, shared), gap(list(arm.values()), list(shared.values()))
    assert paired and paired.interval and apart.interval and paired.size == pytest.approx(apart.size)
    assert paired.interval.low > 0 > apart.interval.low


def test_only_seeds_of_both_count() -> None:
    found = paired_gap({1: 90.0, 2: 91.0}, {2: 92.0, 3: 95.0})
    assert found and found.size == 1 and found.interval is None
    assert paired_gap({1: 90.0}, {2: 92.0}) is None
