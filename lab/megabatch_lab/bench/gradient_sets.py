"""The gradients of a model in flat memory, for `megabatch bench cluster` to all-reduce and check."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from megabatch.models.catalog import ModelSettings, build_model
from megabatch.planning.pipeline import Gradient
from megabatch.planning.plan import BLOCK

IMAGE_SIZE, NUM_CLASSES = 224, 1000
PERIOD = 3  # of the values; coprime to every size that splits a tensor
CHUNK = PERIOD << 20


class GradientSet:
    """All gradients of a model in one tensor, in backward order.

    Each gradient starts at a cache line, like torch's allocations.  The gaps, about 32 bytes in all, are reduced too.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.bounds = [0, *accumulate(-(-size // BLOCK) * BLOCK for size in sizes)]
        self.flat = torch.zeros(self.bounds[-1])

    @property
    def described(self) -> list[Gradient]:
        return [Gradient(size * self.flat.element_size(), "fp32") for size in self.sizes]

    def bucket(self, indices: Sequence[int]) -> torch.Tensor:
        assert list(indices) == list(range(indices[0], indices[-1] + 1)), f"not consecutive: {indices}"
        return self.flat[self.bounds[indices[0]] : self.bounds[indices[-1] + 1]]

    def fill(self, rank: int) -> None:
        """Write small integers, whose sums are exact even in bf16."""
        values = values_of(rank)
        for part in self.flat.split(CHUNK):
            part.copy_(values[: len(part)])

    def check(self, num_ranks: int, scale: float) -> None:
        """Assert that this holds the sum over all ranks times `scale`, then write zeros.  Integers must be exact."""
        expected = sum((values_of(rank) for rank in range(num_ranks)), torch.zeros(CHUNK)) * scale
        for part in self.flat.split(CHUNK):
            is_sum = torch.allclose(part, expected[: len(part)], rtol=0.0 if scale == 1 else 1e-6, atol=0.0)
            assert is_sum, f"{part}, not {expected[: len(part)]}"
        self.flat.zero_()


def values_of(rank: int) -> torch.Tensor:
    return 1.0 + (torch.arange(CHUNK) + rank) % PERIOD


def gradient_sizes(model: str) -> list[int]:
    """Return the number of elements of each gradient, last layer first."""
    built = build_model(ModelSettings(name=model), 0, NUM_CLASSES, 3, IMAGE_SIZE)
    return [parameter.numel() for parameter in reversed(list(built.parameters()))]
