"""Images by sample number, whatever they are made of."""

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
    """Images and labels by sample number.  `read` may be called from any thread, in any order."""

    labels: torch.Tensor  # int64 [N]

    def __len__(self) -> int: ...

    def read(self, samples: Samples) -> torch.Tensor:
        """uint8 [B, C, H, W], a copy that the caller may change."""
        ...


class DataSet(Struct, frozen=True):
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    num_channels: int
    tested_on: str = ""  # where the test images come from, if it is the source that decides
    warnings: tuple[str, ...] = ()  # about its classes

    def fingerprint(self) -> str:
        """Of how many images there are, of which classes, in which order and, of files, under which names."""
        digest = hashlib.sha256("\n".join(self.class_names).encode(errors="surrogateescape"))
        for part in (self.train, self.test):
            digest.update(part.labels.numpy().tobytes())
            if hasattr(part, "fingerprint"):
                digest.update(part.fingerprint().encode())
        return digest.hexdigest()

    @property
    def shape(self) -> DataShape:
        return DataShape(
            num_train=len(self.train),
            num_test=len(self.test),
            num_classes=len(self.class_names),
            num_channels=self.num_channels,
            warnings=self.warnings,
        )


class ArrayImages:
    """Images that lie in memory."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, samples: Samples) -> torch.Tensor:
        return self.images[torch.from_numpy(samples)]


class SyntheticImages:
    """Half a coarse pattern of the sample's class, half one of 64 fields of noise, made when they are read."""

    def __init__(self, settings: SyntheticSettings, image_size: int, length: int, part: int) -> None:
        generator = np.random.Generator(np.random.Philox(key=SYNTHETIC))
        shape = (settings.channels, 4, 4)
        self.patterns = torch.from_numpy(generator.integers(0, 128, (settings.classes, *shape), np.uint8))
        noise_shape = (64, settings.channels, image_size, image_size)
        self.noise = torch.from_numpy(generator.integers(0, 128, noise_shape, np.uint8))
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
    """Some of the images of a set, in the order of `numbers`."""

    def __init__(self, images: ImageSet, numbers: NDArray[np.int64]) -> None:
        self.images, self.numbers = images, numbers
        self.labels = images.labels[torch.from_numpy(numbers)]

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, samples: Samples) -> torch.Tensor:
        return self.images.read(self.numbers[samples])


InMemory = ArrayImages | SyntheticImages | ImageSubset  # whose images are there, or made, in no time
