"""Encoded images, wherever they lie: what every source of JPEGs, PNGs and the like is read as.

A source is a `Library`: class names, and the files of the training and, if it has one, of the test part.  Folders, tars
and packed shards make libraries; `join` puts several together, `split` takes test images from the training part.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megabatch.data.npz import fingerprint

Content = bytes | bytearray | memoryview
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


class Files(Protocol):
    """Encoded images by number.  Any thread may ask, in any order."""

    labels: NDArray[np.int64]

    def __len__(self) -> int: ...

    def content(self, number: int) -> Content:
        """The bytes of one file.  OSError where they cannot be had."""
        ...

    def where(self, number: int) -> str:
        """For messages: the file, and within a tar the offset and the member's name."""
        ...

    def fingerprint(self) -> str:
        """Of which files there are, in which order and of which class; not of what they hold."""
        ...


class Library(Struct, frozen=True, kw_only=True):
    class_names: tuple[str, ...]
    train: Files
    test: Files | None  # None where the source has no such part
    place: str  # for messages


class Chosen:
    """Some of the files, in the order of `numbers`, with labels of their own if classes were numbered anew."""

    def __init__(self, files: Files, numbers: NDArray[np.int64], labels: NDArray[np.int64] | None = None) -> None:
        self.files, self.numbers = files, numbers
        self.labels = files.labels[numbers] if labels is None else labels

    def __len__(self) -> int:
        return len(self.numbers)

    def content(self, number: int) -> Content:
        return self.files.content(int(self.numbers[number]))

    def where(self, number: int) -> str:
        return self.files.where(int(self.numbers[number]))

    def fingerprint(self) -> str:
        return f"{self.files.fingerprint()} {fingerprint(self.numbers, self.labels)}"


class Joined:
    """The files of several sources, one after another."""

    def __init__(self, parts: Sequence[Files]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])
        self.labels = np.concatenate([part.labels for part in parts])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, number: int) -> tuple[Files, int]:
        part = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.parts[part], number - int(self.starts[part])

    def content(self, number: int) -> Content:
        files, number = self.find(number)
        return files.content(number)

    def where(self, number: int) -> str:
        files, number = self.find(number)
        return files.where(number)

    def fingerprint(self) -> str:
        return " ".join(part.fingerprint() for part in self.parts)


def join(first: Library, second: Library) -> Library:
    """Both, with the classes of both by name."""
    class_names = tuple(sorted({*first.class_names, *second.class_names}))
    return Library(
        class_names=class_names,
        train=Joined([numbered_anew(part.train, part.class_names, class_names) for part in (first, second)]),
        test=join_tests(first, second, class_names),
        place=f"{first.place} and {second.place}",
    )


def join_tests(first: Library, second: Library, class_names: tuple[str, ...]) -> Files | None:
    tests = [
        numbered_anew(part.test, part.class_names, class_names) for part in (first, second) if part.test is not None
    ]
    return Joined(tests) if tests else None


def numbered_anew(files: Files, before: tuple[str, ...], after: tuple[str, ...]) -> Files:
    numbers = np.array([after.index(name) for name in before])
    return Chosen(files, np.arange(len(files)), numbers[files.labels])
