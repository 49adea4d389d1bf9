"""The common interface of sources of encoded images (JPEG, PNG, ...): folders, tables, tars and packed shards.

An `EncodedDataset` has class names, the files of the training part and, if there is one, of the test part.
`concatenate` joins two of them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megabatch.io.arrays import fingerprint
from megabatch.io.reading import MOST_BYTES

Content = bytes | bytearray | memoryview
# Of the formats that `data/pipeline/decode.py` reads.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)


class EncodedFiles(Protocol):
    """Encoded images by number, readable from any thread and in any order."""

    labels: NDArray[np.int64]

    def __len__(self) -> int: ...

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        """Return the bytes of a file.  Raise OSError if it cannot be read or is larger than `most_bytes`."""
        ...

    def where(self, number: int, read: bool = True) -> str:
        """Return the location of a file for messages: its path or, in a tar, the offset and (if `read`) the name."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the names, order and classes of the files, but not of their contents."""
        ...


class EncodedDataset(Struct, frozen=True, kw_only=True):
    """A source whose images are decoded when they are read."""

    class_names: tuple[str, ...]
    train: EncodedFiles
    test: EncodedFiles | None
    place: str  # for messages
    shorter_side: int | None = None  # to which a pack shrank larger images
    label_sets: NDArray[np.bool_] | None = None  # [lists, classes] of a multi-label source, whose labels number lists
    ignored: tuple[tuple[str, int], ...] = ()  # suffixes of other files in the class folders, with their counts


class Subset:
    """The files `numbers` of another set, with the same labels unless others are given."""

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
    """The files of several sources in sequence."""

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
    """Join two data sets.  Classes of the same name become one class."""
    both = (first, second)
    class_names = tuple(sorted({*first.class_names, *second.class_names}))
    tests = [with_classes(part.test, part.class_names, class_names) for part in both if part.test is not None]
    return EncodedDataset(
        class_names=class_names,
        train=Concatenated([with_classes(part.train, part.class_names, class_names) for part in both]),
        test=Concatenated(tests) if tests else None,
        place=f"{first.place} and {second.place}",
        ignored=(*first.ignored, *second.ignored),
    )


def with_classes(files: EncodedFiles, names: tuple[str, ...], new_names: tuple[str, ...]) -> EncodedFiles:
    """Return the files with labels that index `new_names`, which contains all `names`."""
    number_of = {name: number for number, name in enumerate(new_names)}
    new_labels = np.array([number_of[name] for name in names])
    return Subset(files, np.arange(len(files)), new_labels[files.labels])
