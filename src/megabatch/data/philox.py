"""Random numbers that are a function of a counter: Philox 4x32-10 (Salmon et al. 2011), on whole arrays.

There is no state: the words drawn for (seed, stream, a, b) are the same on every rank and thread, and after a
resume.  Streams keep uses apart, so that a sample's crop says nothing about its place in the order.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
