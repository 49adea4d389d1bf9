import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megabatch.data.pipeline.order import epoch_order, samples_at


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), num_samples=st.integers(1, 300))
def test_every_sample_appears_once_per_epoch(seed: int, epoch: int, num_samples: int) -> None:
    assert sorted(epoch_order(seed, epoch, num_samples)) == list(range(num_samples))


@given(num_samples=st.integers(1, 50), cut=st.integers(1, 90))
def test_slices_of_the_stream_join_to_consecutive_epochs(num_samples: int, cut: int) -> None:
    whole = np.concatenate([epoch_order(3, epoch, num_samples) for epoch in range(5)])
    pieces = [
        samples_at(3, num_samples, range(start, min(start + cut, len(whole)))) for start in range(0, len(whole), cut)
    ]
    assert np.array_equal(np.concatenate([samples for samples, _ in pieces]), whole)
    assert np.array_equal(np.concatenate([epochs for _, epochs in pieces]), np.repeat(np.arange(5), num_samples))


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(epoch_order(seed, epoch, 100)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(range(100)) not in orders


def test_every_position_is_equally_likely() -> None:
    places = np.array([epoch_order(1, epoch, 10) for epoch in range(5000)])
    counts = np.array([np.bincount(column, minlength=10) for column in places.T])
    assert abs(counts - 500).max() < 110  # five standard deviations
