"""Reads the binary version of CIFAR-10 and CIFAR-100: its folder, or the .tar.gz that is downloaded.

A record is the label (in CIFAR-100 a coarse one, which is not read, and a fine one), and 32 x 32 bytes of red, of
green and of blue.  The names of the classes are in a text file.
"""

import gzip
import io
import zlib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megabatch.errors import UserError
from megabatch.io.arrays import Arrays, NotArrays
from megabatch.io.reading import read_regular, reading
from megabatch.io.tars import Damaged, walk_members

SIDE, CHANNELS = 32, 3
MOST_BYTES = 300_000_000  # of a file, or of the whole archive, which has 184 MB
ARCHIVES = (".tar.gz", ".tgz")


class Version(NamedTuple):
    """The files of CIFAR-10 or CIFAR-100."""

    train: tuple[str, ...]
    test: str
    names: str
    num_labels: int  # per record; the last one is the class


VERSIONS = (
    Version(tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin", "batches.meta.txt", 1),
    Version(("train.bin",), "test.bin", "fine_label_names.txt", 2),
)
PICKLED = ("batches.meta", "meta")  # only the version for Python has these


def holds_cifar(path: Path) -> bool:
    """Return whether the source is a folder of CIFAR's files, or may be its archive."""
    if path.name.endswith(ARCHIVES):
        return True
    names = {*(version.names for version in VERSIONS), *PICKLED}
    return path.is_dir() and any(entry.name in names and entry.is_file() for entry in path.iterdir())


def read_cifar(path: Path) -> Arrays:
    """Return the four arrays of an array source and the names of the classes."""
    try:
        files = read_folder(path) if path.is_dir() else read_archive(path)
        version = next((version for version in VERSIONS if version.names in files), None)
        if version is None:
            raise NotArrays("it has no batches.meta.txt of CIFAR-10 and no fine_label_names.txt of CIFAR-100")
        missing = [name for name in (*version.train, version.test) if name not in files]
        if missing:
            raise NotArrays(f"it has no {missing[0]}")
        names = files[version.names].decode("utf-8", "replace").split()
        parts = {"train": b"".join(files[name] for name in version.train), "test": files[version.test]}
        arrays: Arrays = {"class_names": np.array(names)}
        for part, content in parts.items():
            arrays[f"{part}_images"], arrays[f"{part}_labels"] = parse_records(content, version.num_labels, part)
    except (OSError, EOFError, zlib.error, MemoryError, Damaged, NotArrays) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path} cannot be read as CIFAR's binary version ({reason}); download cifar-10-binary.tar.gz (again), not "
            "the version for Python"
        ) from error
    return arrays


def parse_records(content: bytes, num_labels: int, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the images, [N, H, W, C], and their labels."""
    length = num_labels + CHANNELS * SIDE**2
    if not content or len(content) % length:
        raise NotArrays(f"its {part} images have {len(content):,} bytes, not a multiple of {length:,}")
    records = np.frombuffer(content, np.uint8).reshape(-1, length)
    planes = records[:, num_labels:].reshape(-1, CHANNELS, SIDE, SIDE)
    return planes.transpose(0, 2, 3, 1), records[:, num_labels - 1]


def is_wanted(name: str) -> bool:
    return any(name in (*version.train, version.test, version.names) for version in VERSIONS)


def read_folder(path: Path) -> dict[str, bytes]:
    names = [entry.name for entry in path.iterdir() if is_wanted(entry.name)]
    return {name: read_regular(path / name, MOST_BYTES) for name in names}


def read_archive(path: Path) -> dict[str, bytes]:
    with reading(path) as file:
        content = gzip.GzipFile(fileobj=file).read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise NotArrays(f"it expands to more than {MOST_BYTES:,} bytes")
    view = io.BytesIO(content)

    def read(offset: int, length: int) -> bytes:
        view.seek(offset)
        return view.read(length)

    members = {PurePosixPath(member.name).name: member for member in walk_members(read, len(content))}
    return {name: read(member.offset, member.length) for name, member in members.items() if is_wanted(name)}
