"""The `ImageSet` protocol, and image sets that are in memory."""

import hashlib
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct
from numpy.typing import NDArray

from megabatch.data.pipeline.order import SYNTHETIC, Samples, draw, draw_below
from megabatch.data.settings import SyntheticSettings
from megabatch.data.sources.shapes import DataShape


class ImageSet(Protocol):
    """Images and labels by sample number.  `read` may be called from any thread and in any order."""

    labels: torch.Tensor  # int64 [N]

    def __len__(self) -> int: ...

    def read(self, samples: Samples) -> torch.Tensor:
        """Return the images, uint8 [B, C, H, W], as a copy that the caller may change."""
        ...


class PixelStatistics(Struct, frozen=True):
    """Mean and deviation per channel of a training set."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]  # 1 for a channel without variation, which is only shifted


class DataSet(Struct, frozen=True):
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    num_channels: int
    # bool [lists, classes] of multi-label images, whose labels are the numbers of lists of classes.
    label_sets: torch.Tensor | None = None
    tested_on: str = ""  # the origin of the test images, if the source determines it
    warnings: tuple[str, ...] = ()  # about the classes

    def fingerprint(self) -> str:
        """Return a hash of the class names, the labels in order and, for files, their names."""
        digest = hashlib.sha256("\n".join(self.class_names).encode(errors="surrogateescape"))
        if self.label_sets is not None:
            digest.update(self.label_sets.numpy().tobytes())
        for part in (self.train, self.test):
            digest.update(part.labels.numpy().tobytes())
            if hasattr(part, "fingerprint"):
                digest.update(part.fingerprint().encode())
        return digest.hexdigest()

    def count_classes(self) -> list[int]:
        """Return the number of training images of each class."""
        if self.label_sets is None:
            counts = self.train.labels.bincount(minlength=len(self.class_names))
        else:
            counts = self.train.labels.bincount(minlength=len(self.label_sets)) @ self.label_sets.long()
        return counts.tolist()

    @property
    def shape(self) -> DataShape:
        return DataShape(
            num_train=len(self.train),
            num_test=len(self.test),
            num_classes=len(self.class_names),
            num_channels=self.num_channels,
            warnings=self.warnings,
        )


def resize_all(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize uint8 images [B, C, H, W] to (height, width), if they have another size."""
    return images if images.shape[2:] == size else F.interpolate(images, size=size, mode="bilinear", antialias=True)


class ArrayImages:
    """Images in memory."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, samples: Samples) -> torch.Tensor:
        return self.images[torch.from_numpy(samples)]


class SyntheticImages:
    """Generated images: the sum of a coarse pattern of the class and one of 64 noise images.

    The noise is drawn for `image_size` and resized to `side`, so images of two sides show the same.
    """

    def __init__(self, settings: SyntheticSettings, image_size: int, length: int, part: int, side: int) -> None:
        generator = np.random.Generator(np.random.Philox(key=SYNTHETIC))
        shape = (settings.channels, 4, 4)
        self.patterns = torch.from_numpy(generator.integers(0, 128, (settings.classes, *shape), np.uint8))
        noise_shape = (64, settings.channels, image_size, image_size)
        self.noise = resize_all(torch.from_numpy(generator.integers(0, 128, noise_shape, np.uint8)), (side, side))
        label_words, noise_words, *_ = draw(SYNTHETIC, part, np.arange(length), 0)
        self.labels = torch.from_numpy(draw_below(settings.classes, label_words))
        self.noise_of = torch.from_numpy(draw_below(len(self.noise), noise_words))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, samples: Samples) -> torch.Tensor:
        chosen = torch.from_numpy(samples)
        patterns = F.interpolate(self.patterns[self.labels[chosen]], size=self.noise.shape[-2:])
        return patterns + self.noise[self.noise_of[chosen]]


class ImageSubset:
    """The images `numbers` of another set."""

    def __init__(self, images: ImageSet, numbers: NDArray[np.int64]) -> None:
        self.images, self.numbers = images, numbers
        self.labels = images.labels[torch.from_numpy(numbers)]

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, samples: Samples) -> torch.Tensor:
        return self.images.read(self.numbers[samples])


def is_in_memory(images: ImageSet) -> bool:
    """Return whether the images are fast to read."""
    while isinstance(images, ImageSubset):
        images = images.images
    return isinstance(images, ArrayImages | SyntheticImages)
