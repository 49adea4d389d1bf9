"""The order of the samples: one seeded permutation per epoch, one epoch after another, without end.

Position p of the stream is sample order(epoch p // N)[p % N]; a step may straddle two epochs.
"""

import threading
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Random numbers that are a function of a counter: Philox 4x32-10 (Salmon et al. 2011), on whole arrays.
#
# There is no state: the words drawn for (seed, stream, a, b) are the same on every rank and thread, and after a
# resume.  Streams keep uses apart, so that a sample's crop says nothing about its place in the order.

ORDER, AUGMENT, DROPOUT, SYNTHETIC, VALIDATION, PER_CLASS = range(6)
CROP = 16  # and the streams after it, one for each attempt at a crop that fits

Words = NDArray[np.uint64]  # each holds 32 random bits
Quadruple = tuple[Any, Any, Any, Any]  # of Words, or of ints

LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: Quadruple, key: tuple[int, int]) -> Quadruple:
    """Ten rounds over 32-bit words: Python's ints, or arrays of 64-bit lanes, in which no product overflows."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        product_a, product_c = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            (product_c >> 32) ^ b ^ left,
            product_c & LOW,
            (product_a >> 32) ^ d ^ right,
            product_a & LOW,
        )
        left, right = (left + WEYL[0]) & LOW, (right + WEYL[1]) & LOW
    return a, b, c, d


def draw(seed: int, stream: ArrayLike, first: ArrayLike, second: ArrayLike) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for every triple (stream, first, second); the three broadcast against each other."""
    streams, a, b = np.broadcast_arrays(*(np.asarray(numbers, np.uint64) for numbers in (stream, first, second)))
    counter = (a & LOW, a >> 32, b & LOW, streams)
    return philox(counter, (seed & LOW, seed >> 32))


def draw_below(limit: int, words: Words) -> NDArray[np.int64]:
    """Maps 32-bit words to 0 .. limit-1, evenly to within limit / 2^32."""
    return ((words * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)


def dropout_seed(seed: int, step: int, microbatch: int) -> int:
    """What torch's generator is seeded with before the forward pass of a microbatch."""
    high, low, *_ = philox((step, 0, microbatch, DROPOUT), (seed & LOW, seed >> 32))
    return int(high << 32 | low)


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
