"""The order of the samples: one seeded permutation per epoch, one epoch after another, without end.

Position p of the stream is sample order(epoch p // N)[p % N]; a step may straddle two epochs.
"""

import threading
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megabatch.data.philox import ORDER, draw

Samples = NDArray[np.int64]
SORTING = threading.Lock()


def epoch_order(seed: int, epoch: int, num_samples: int) -> Samples:
    """All samples once.  Of threads that ask for the same, one works it out."""
    with SORTING:
        return sorted_order(seed, epoch, num_samples)


@lru_cache(maxsize=2)  # a step touches at most two neighbouring epochs, unless the batch is larger than one
def sorted_order(seed: int, epoch: int, num_samples: int) -> Samples:
    """By the rank of a random 64-bit number drawn for each sample."""
    high, low, *_ = draw(seed, ORDER, np.arange(num_samples), epoch)
    return np.argsort(high << np.uint64(32) | low, kind="stable")


def samples_at(seed: int, num_samples: int, positions: range) -> tuple[Samples, Samples]:
    """The samples at these positions, and the epoch in which each of them is seen."""
    epochs, places = np.divmod(np.arange(positions.start, positions.stop), num_samples)
    samples = np.empty_like(places)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        samples[here] = epoch_order(seed, epoch, num_samples)[places[here]]
    return samples, epochs
