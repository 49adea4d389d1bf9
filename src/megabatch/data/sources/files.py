"""Encoded images, wherever they lie: what every source of JPEGs, PNGs and the like is read as.

A source is an `EncodedDataset`: class names, and the files of the training and, if it has one, of the test part.
Folders, tars and packed shards are read as one; `concatenate` puts two together, and `sources.split` takes test images
from the training part.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megabatch.io.arrays import fingerprint
from megabatch.io.reading import MOST_BYTES

Content = bytes | bytearray | memoryview
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


class EncodedFiles(Protocol):
    """Encoded images by number.  Any thread may ask, in any order."""

    labels: NDArray[np.int64]

    def __len__(self) -> int: ...

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        """The bytes of one file.  OSError where they cannot be had, or are more."""
        ...

    def where(self, number: int, read: bool = True) -> str:
        """For messages: the file, and within a tar the offset and, where it may be read, the member's name."""
        ...

    def fingerprint(self) -> str:
        """Of which files there are, in which order and of which class; not of what they hold."""
        ...


class EncodedDataset(Struct, frozen=True, kw_only=True):
    """A source whose images are decoded when they are asked for."""

    class_names: tuple[str, ...]
    train: EncodedFiles
    test: EncodedFiles | None  # None where the source has no such part
    place: str  # for messages


class Subset:
    """Some of the files, in the order of `numbers`, with labels of their own where the classes have other numbers."""

    def __init__(
        self, files: EncodedFiles, numbers: NDArray[np.int64], labels: NDArray[np.int64] | None = None
    ) -> None:
        self.files, self.numbers = files, numbers
        self.labels = files.labels[numbers] if labels is None else labels

    def __len__(self) -> int:
        return len(self.numbers)

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        return self.files.content(int(self.numbers[number]), most_bytes)

    def where(self, number: int, read: bool = True) -> str:
        return self.files.where(int(self.numbers[number]), read)

    def fingerprint(self) -> str:
        return f"{self.files.fingerprint()} {fingerprint(self.numbers, self.labels)}"


class Concatenated:
    """The files of several sources, one after another."""

    def __init__(self, parts: Sequence[EncodedFiles]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])
        self.labels = np.concatenate([part.labels for part in parts])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, number: int) -> tuple[EncodedFiles, int]:
        part = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.parts[part], number - int(self.starts[part])

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        files, number = self.find(number)
        return files.content(number, most_bytes)

    def where(self, number: int, read: bool = True) -> str:
        files, number = self.find(number)
        return files.where(number, read)

    def fingerprint(self) -> str:
        return " ".join(part.fingerprint() for part in self.parts)


def concatenate(first: EncodedDataset, second: EncodedDataset) -> EncodedDataset:
    """Both, with the classes of both by name."""
    class_names = tuple(sorted({*first.class_names, *second.class_names}))
    return EncodedDataset(
        class_names=class_names,
        train=Concatenated([with_classes(part.train, part.class_names, class_names) for part in (first, second)]),
        test=concatenate_tests(first, second, class_names),
        place=f"{first.place} and {second.place}",
    )


def concatenate_tests(
    first: EncodedDataset, second: EncodedDataset, class_names: tuple[str, ...]
) -> EncodedFiles | None:
    tests = [
        with_classes(part.test, part.class_names, class_names) for part in (first, second) if part.test is not None
    ]
    return Concatenated(tests) if tests else None


def with_classes(files: EncodedFiles, names: tuple[str, ...], new_names: tuple[str, ...]) -> EncodedFiles:
    """All of them, with labels that number `new_names`, among which are all `names`."""
    new_labels = np.array([new_names.index(name) for name in names])
    return Subset(files, np.arange(len(files)), new_labels[files.labels])
