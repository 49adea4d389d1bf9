"""Images in tars: shards of `megabatch pack` with their index, or WebDataset's shards without one, scanned once."""

import os
import resource
import threading
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.files import EncodedDataset
from megabatch.data.sources.index import INDEX, TEST, TRAIN, cached_index, read_index
from megabatch.data.sources.tars import CLASSES, is_current, is_tar, list_tars, name_classes, scan
from megabatch.errors import UserError
from megabatch.io.arrays import Arrays, fingerprint
from megabatch.io.reading import MOST_BYTES, open_regular, require_modest
from megabatch.io.tars import Damaged, member_name
from megabatch.text import one_line

# The bytes of samples in tars that stay open: no file is opened per image.
#
# Members are never unpacked, so that what they are called does not matter.  Shards are read and not mapped into
# memory: it takes as long, and a shard that is truncated or lies on a bad disk is an error that can be told, where a
# map would kill the process.

SPARE_DESCRIPTORS = 512


class Shards:
    """Tars, opened when they are first asked for and then kept open."""

    def __init__(self, paths: Sequence[Path], sizes: NDArray[np.int64]) -> None:
        self.paths, self.sizes = paths, sizes
        self.files: list[FileIO | None] = [None] * len(paths)
        self.lock = threading.Lock()

    def open(self, shard: int) -> FileIO:
        with self.lock:
            found = self.files[shard]
            if found is None:
                allow_descriptors(len(self.paths))
                found = self.files[shard] = FileIO(self.paths[shard], opener=open_regular)
        return found

    def read(self, shard: int, offset: int, length: int) -> bytes:
        file = self.files[shard] or self.open(shard)
        content = os.pread(file.fileno(), length, offset)
        if len(content) < length:
            raise OSError(f"{self.paths[shard].name} ends before offset {offset + length:,}, where it did not before")
        return content

    def member_name(self, shard: int, offset: int) -> str:
        def read(start: int, length: int) -> bytes:
            return self.read(shard, start, min(length, size - start))

        size = int(self.sizes[shard])
        return member_name(read, size, offset)


class ShardFiles:
    """Samples in shards."""

    def __init__(
        self,
        shards: Shards,
        shard: NDArray[np.int32],
        offset: NDArray[np.int64],
        length: NDArray[np.int64],
        labels: NDArray[np.int64],
    ) -> None:
        self.shards, self.shard, self.offset, self.length, self.labels = shards, shard, offset, length, labels

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> bytes:
        require_modest(int(self.length[number]), most_bytes)
        return self.shards.read(int(self.shard[number]), int(self.offset[number]), int(self.length[number]))

    def where(self, number: int, read: bool = True) -> str:
        shard, offset = int(self.shard[number]), int(self.offset[number])
        name = f" ({self.readable_name(number)})" if read else ""
        return f"{one_line(str(self.shards.paths[shard]))} at offset {offset}{name}"

    def readable_name(self, number: int) -> str:
        try:
            return one_line(self.name(number))
        except (Damaged, OSError):
            return "its header is damaged"

    def name(self, number: int) -> str:
        return self.shards.member_name(int(self.shard[number]), int(self.offset[number]))

    def fingerprint(self) -> str:
        """Of which shards there are, and of where and of which class the samples are; not of what they hold."""
        names = np.array([path.name for path in self.shards.paths])
        return fingerprint(names, self.shards.sizes, self.shard, self.offset, self.length, self.labels)


def allow_descriptors(num_shards: int) -> None:
    """A set may have more shards than a process may have open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_shards + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


UNFINISHED = ".pack.json"  # in a pack that is being written


def holds_shards(path: Path) -> bool:
    """Whether `read_shards` is for it: a tar, a pack, or a folder of tars alone.

    Tars beside folders are taken for the archives from which these were unpacked.
    """
    if not path.is_dir():
        return path.is_file() and is_tar(path)
    entries = [entry for entry in path.iterdir() if entry.name in (INDEX, UNFINISHED) or not entry.name.startswith(".")]
    if any(entry.name in (INDEX, UNFINISHED) for entry in entries):
        return True
    return any(is_tar(entry) for entry in entries) and not any(entry.is_dir() for entry in entries)


def read_shards(path: Path) -> EncodedDataset:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a .tar file, or a folder of them")
    try:
        if (path / INDEX).exists():
            return to_dataset(path, read_index(path))
        if (path / UNFINISHED).exists():
            raise UserError(f"{path} is a pack that was not finished; finish it with the same megabatch pack command")
        shards = list_tars(path)
        index = cached_index("tars", path, lambda: scan(shards, path), lambda index: is_current(index, shards))
        return to_dataset(path, index)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{error.filename or path} cannot be read ({reason}); fix that, or give another") from error


def to_dataset(path: Path, index: Arrays) -> EncodedDataset:
    folder = path if path.is_dir() else path.parent
    shards = Shards([folder / str(name) for name in index["shards"]], index["sizes"])

    def files(split: int) -> ShardFiles:
        chosen = index["split"] == split
        return ShardFiles(shards, *(index[name][chosen] for name in ("shard", "offset", "length", "label")))

    test = files(TEST)
    names = name_classes(folder / CLASSES, tuple(str(name) for name in index["class_names"]))
    return EncodedDataset(class_names=names, train=files(TRAIN), test=test if len(test) else None, place=str(path))
