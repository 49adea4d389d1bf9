"""Counter-based random numbers, and the order of the samples.

Position p of the sample stream is sample order(epoch p // N)[p % N].  The order is a seeded permutation per
epoch.  A step may span two epochs.

Random numbers come from Philox 4x32-10 (Salmon et al. 2011) on whole arrays.  There is no state: the words drawn for
(seed, stream, a, b) are the same on every rank and thread, and after a resume.  Each use has its stream, so that the
crop of a sample is independent of its position in the order.
"""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

ORDER, AUGMENT, DROPOUT, SYNTHETIC, VALIDATION, PER_CLASS, FLIP, JITTER, JITTER_ORDER, ERASE, MIX, BALANCE = range(12)
CROP = 16  # the first of ATTEMPTS streams, one per attempt at a crop
BOX = 32  # the same for the boxes of random erasing
POLICY = 48  # the first of two streams per operation of a policy

Words = NDArray[np.uint64]  # each holds 32 random bits
Quadruple = tuple[Any, Any, Any, Any]  # of Words or of ints
Samples = NDArray[np.int64]

LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
SORTING = threading.Lock()


def philox(counter: Quadruple, key: tuple[int, int]) -> Quadruple:
    """Run ten rounds over 32-bit words: Python ints, or arrays of 64-bit lanes, in which no product overflows."""
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
    """Return four 32-bit words for every triple (stream, first, second), after broadcasting the three."""
    streams, a, b = np.broadcast_arrays(*(np.asarray(numbers, np.uint64) for numbers in (stream, first, second)))
    counter = (a & LOW, a >> 32, b & LOW, streams)
    return philox(counter, (seed & LOW, seed >> 32))


def draw_below(limit: int, words: Words) -> NDArray[np.int64]:
    """Map 32-bit words to 0 .. limit-1, uniformly to within limit / 2^32."""
    return ((words * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)


def dropout_seed(seed: int, step: int, microbatch: int) -> int:
    """Return the seed of torch's generator for the forward pass of a microbatch."""
    return draw_seed(DROPOUT, seed, step, microbatch)


def mix_seed(seed: int, step: int, microbatch: int) -> int:
    """Return the key of numpy's generator for MixUp and CutMix."""
    return draw_seed(MIX, seed, step, microbatch)


def draw_seed(stream: int, seed: int, step: int, microbatch: int) -> int:
    high, low, *_ = philox((step, 0, microbatch, stream), (seed & LOW, seed >> 32))
    return int(high << 32 | low)


def epoch_order(seed: int, epoch: int, num_samples: int) -> Samples:
    """Return a permutation of the samples.  The lock keeps several threads from computing the same one."""
    with SORTING:
        return sorted_order(seed, epoch, num_samples)


@lru_cache(maxsize=2)  # a step uses at most two adjacent epochs, unless the batch is larger than an epoch
def sorted_order(seed: int, epoch: int, num_samples: int) -> Samples:
    """Sort the samples by a random 64-bit number for each."""
    high, low, *_ = draw(seed, ORDER, np.arange(num_samples), epoch)
    return np.argsort(high << np.uint64(32) | low, kind="stable")


# The samples of an epoch in their order, and for each the number of its earlier uses in the run.
EpochSamples = Callable[[int], tuple[Samples, Samples]]


def samples_at(
    seed: int,
    num_samples: int,
    positions: range | Samples,
    repeats: int = 1,
    epoch_samples: EpochSamples | None = None,
) -> tuple[Samples, Samples]:
    """Return the samples at these positions and the epoch of each.

    With `epoch_samples`, an epoch may have a sample several times.  Each use then counts as an epoch of the sample.

    With `repeats`, each sample of the order takes that many positions, so that an epoch, whose length stays, has only
    the first samples of its order (repeated augmentation, Hoffer et al. 2020).  Each copy then counts as an epoch, so
    that it is augmented differently.
    """
    if isinstance(positions, range):
        positions = np.arange(positions.start, positions.stop)
    epochs, places = np.divmod(positions, num_samples)
    places, copies = np.divmod(places, repeats)
    samples, uses = np.empty_like(places), epochs.copy()
    for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
        here = epochs == epoch
        if epoch_samples is None:
            samples[here] = epoch_order(seed, epoch, num_samples)[places[here]]
        else:
            samples[here], uses[here] = (found[places[here]] for found in epoch_samples(epoch))
    return samples, uses * repeats + copies


def spread_copies(positions: range, global_batch: int, repeats: int) -> Samples:
    """Permute the positions of a step so that the copies of a sample are about global_batch / repeats apart.

    They are then in different microbatches, if there are enough, so BatchNorm and MixUp do not see them together.
    """
    start = positions.start // global_batch * global_batch
    order = np.concatenate([np.arange(first, global_batch, repeats) for first in range(repeats)])
    return start + order[positions.start - start : positions.stop - start]


class BalancedOrder:
    """Balanced sampling: an epoch has the same number of images of every class.  An instance is an `EpochSamples`.

    With N images and K classes, an epoch keeps its N positions, and each class takes q = ceil(N / K) of them.  A class
    goes through a sequence of permutations of its n images, one after the other without end: its use u is image
    u mod n of permutation u // n.  Epoch e has the uses e q to e q + q - 1.  So the images of a class are used equally
    often, and the number of a permutation is that of the earlier uses of its images.  The K q images are shuffled and
    cut to N.

    If all classes have the same size, an epoch is a permutation of the set.
    """

    def __init__(self, seed: int, labels: NDArray[np.int64]) -> None:
        self.seed, self.num_samples = seed, len(labels)
        self.members = np.argsort(labels, kind="stable")  # by class
        self.counts = np.unique(labels, return_counts=True)[1]  # of the classes that have images
        self.starts = np.cumsum(self.counts) - self.counts
        self.quota = -(-len(labels) // len(self.counts))
        self.find = lru_cache(maxsize=2)(self.sort)  # a step uses at most two adjacent epochs, unless it is larger

    def __call__(self, epoch: int) -> tuple[Samples, Samples]:
        return self.find(epoch)

    def sort(self, epoch: int) -> tuple[Samples, Samples]:
        first_use, counts = epoch * self.quota, self.counts
        first_cycle = first_use // counts
        num_cycles = (first_use + self.quota - 1) // counts - first_cycle + 1
        # Rows for all permutations that the epoch touches: by class, permutation and image.
        lengths = num_cycles * counts
        of_class = np.repeat(np.arange(len(counts)), lengths)
        places = np.arange(len(of_class)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        cycles = first_cycle[of_class] + places // counts[of_class]
        samples = self.members[self.starts[of_class] + places % counts[of_class]]
        high, low, *_ = draw(self.seed, BALANCE, samples, cycles)
        shuffled = np.lexsort((low, high, cycles, of_class))
        uses = (first_cycle * counts)[of_class] + places  # sorting keeps class and permutation of every row
        taken = (uses >= first_use) & (uses < first_use + self.quota)
        order = epoch_order(self.seed, epoch, int(taken.sum()))[: self.num_samples]
        return samples[shuffled][taken][order], cycles[taken][order]
