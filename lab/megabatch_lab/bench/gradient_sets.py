"""A model's gradients as flat memory: the tensors that `megabatch bench cluster` sums, and the check of a sum."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from megabatch.models.catalog import ModelSettings, build_model
from megabatch.planning.pipeline import Gradient
from megabatch.planning.plan import BLOCK

IMAGE_SIZE, NUM_CLASSES = 224, 1000
PERIOD = 3  # of the values that are summed; prime to everything that cuts a tensor
CHUNK = PERIOD << 20


class GradientSet:
    """All gradients of a model, in backward order, in one piece of memory.

    Each begins at a cache line, as torch's own allocations do; the gaps, some 32 bytes in all, travel along.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.bounds = [0, *accumulate(-(-size // BLOCK) * BLOCK for size in sizes)]
        self.flat = torch.zeros(self.bounds[-1])

    @property
    def described(self) -> list[Gradient]:
        return [Gradient(size * self.flat.element_size(), "fp32") for size in self.sizes]

    def bucket(self, indices: Sequence[int]) -> torch.Tensor:
        assert list(indices) == list(range(indices[0], indices[-1] + 1)), f"not one after another: {indices}"
        return self.flat[self.bounds[indices[0]] : self.bounds[indices[-1] + 1]]

    def fill(self, rank: int) -> None:
        """With small whole numbers, of which even bf16 holds the sums exactly."""
        values = values_of(rank)
        for part in self.flat.split(CHUNK):
            part.copy_(values[: len(part)])

    def check(self, num_ranks: int, scale: float) -> None:
        """The sum of what all ranks have filled in, times `scale`; whole numbers are exact.  Leaves zeros."""
        expected = sum((values_of(rank) for rank in range(num_ranks)), torch.zeros(CHUNK)) * scale
        for part in self.flat.split(CHUNK):
            is_sum = torch.allclose(part, expected[: len(part)], rtol=0.0 if scale == 1 else 1e-6, atol=0.0)
            assert is_sum, f"{part}, not {expected[: len(part)]}"
        self.flat.zero_()


def values_of(rank: int) -> torch.Tensor:
    return 1.0 + (torch.arange(CHUNK) + rank) % PERIOD


def gradient_sizes(model: str) -> list[int]:
    """Elements of each gradient, the last layer's first."""
    built = build_model(ModelSettings(name=model), 0, NUM_CLASSES, 3, IMAGE_SIZE)
    return [parameter.numel() for parameter in reversed(list(built.parameters()))]
