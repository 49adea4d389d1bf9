"""Random numbers that are a function of a counter: Philox 4x32-10 (Salmon et al. 2011), on whole arrays.

There is no state: the words drawn for (seed, stream, a, b) are the same on every rank and thread, and after a
resume.  Streams keep uses apart, so that a sample's crop says nothing about its place in the order.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

ORDER, AUGMENT, DROPOUT, SYNTHETIC = range(4)

Words = NDArray[np.uint64]  # each holds 32 random bits
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over 32-bit words held in 64-bit lanes, so that a product never overflows."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        product_a, product_c = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            (product_c >> SHIFT) ^ b ^ np.uint64(left),
            product_c & LOW,
            (product_a >> SHIFT) ^ d ^ np.uint64(right),
            product_a & LOW,
        )
        left, right = (left + WEYL[0]) & 0xFFFFFFFF, (right + WEYL[1]) & 0xFFFFFFFF
    return a, b, c, d


def draw(seed: int, stream: int, first: ArrayLike, second: ArrayLike) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words for every pair (first, second); the two broadcast against each other."""
    a, b = np.broadcast_arrays(np.asarray(first, np.uint64), np.asarray(second, np.uint64))
    counter = (a & LOW, a >> SHIFT, b & LOW, np.full_like(a, stream))
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))


def draw_below(limit: int, words: Words) -> NDArray[np.int64]:
    """Maps 32-bit words to 0 .. limit-1, evenly to within limit / 2^32."""
    return ((words * np.uint64(limit)) >> SHIFT).astype(np.int64)


def dropout_seed(seed: int, step: int, microbatch: int) -> int:
    """What torch's generator is seeded with before the forward pass of a microbatch."""
    high, low, *_ = draw(seed, DROPOUT, [step], [microbatch])
    return int(high[0] << SHIFT | low[0])
