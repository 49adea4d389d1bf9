"""Balanced sampling: an epoch has the same number of images of every class.

With N images and K classes, an epoch keeps its N positions, and each class takes q = ceil(N / K) of them.  A class goes
through a sequence of permutations of its n images, one after the other without end: its use u is image u mod n of
permutation u // n.  Epoch e has the uses e q to e q + q - 1.  So the images of a class are used equally often, and the
number of a permutation is that of the earlier uses of its images.  The K q images are shuffled and cut to N.

If all classes have the same size, an epoch is a permutation of the set.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megabatch.data.pipeline.order import BALANCE, Samples, draw, epoch_order


class BalancedOrder:
    """The order of a training set with these labels.  Call it with the number of an epoch; see `EpochSamples`."""

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
