"""Writes one shard: a plain tar of an image and its label per sample, and a record of where they lie.

A shard gets its name when all of it is on disk, and its record too: .train-000003.npz of train-000003.tar.  So a shard
with a name has a record, whenever the machine was switched off.
"""

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from msgspec import Struct

from megabatch import disk
from megabatch.data.files import Content
from megabatch.data.npz import Arrays, write_arrays
from megabatch.data.shrink import Stored
from megabatch.data.tars import BLOCK, padded

END = bytes(2 * BLOCK)  # of a tar
BUFFER_BYTES = 1 << 20
ROW: dict[str, type[np.integer[Any]]] = {
    "number": np.int64,
    "offset": np.int64,
    "length": np.int64,
    "label": np.int64,
    "crc32": np.uint32,
    "width": np.int32,
    "height": np.int32,
}


def shard_name(part: str, shard: int) -> str:
    return f"{part}-{shard:06d}.tar"


def record_path(path: Path) -> Path:
    """Of the record of the shard at `path`."""
    return path.with_name(f".{path.stem}.npz")


def member_header(name: str, length: int) -> bytes:
    """Without time, owner or anything else that differs between two packs of the same images."""
    member = tarfile.TarInfo(name)
    member.size = length
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


class Sample(Struct, frozen=True):
    """A sample's bytes in the tar: the image, and what goes before and after it."""

    before: bytes
    image: Content
    after: bytes
    label: int
    crc32: int  # of the image
    width: int
    height: int

    @classmethod
    def of(cls, key: str, suffix: str, stored: Stored, label: int) -> "Sample":
        image, text = stored.content, str(label).encode()
        before = member_header(key + suffix, len(image))
        after = padding(len(image)) + member_header(f"{key}.cls", len(text)) + text + padding(len(text))
        return cls(before, image, after, label, zlib.crc32(image), stored.width, stored.height)

    def __len__(self) -> int:
        return len(self.before) + len(self.image) + len(self.after)


def padding(length: int) -> bytes:
    return bytes(padded(length) - length)


@contextmanager
def writing_shard(path: Path) -> Iterator["ShardWriter"]:
    """A shard for the block to fill and `finish`.  If the block raises, there is none."""
    with disk.writing(path) as new, new.open("wb", buffering=BUFFER_BYTES) as file:
        writer = ShardWriter(path, file)
        yield writer
        assert writer.is_finished, f"{path}: a shard without its record"


class ShardWriter:
    """One shard, which has its name when the block of `writing_shard` ends."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = 0
        self.rest_crc32 = 0  # of all bytes but the images'
        self.rows: list[tuple[int, ...]] = []
        self.is_finished = False

    def add(self, number: int, sample: Sample) -> None:
        offset, length = self.size + len(sample.before), len(sample.image)
        self.rows.append((number, offset, length, sample.label, sample.crc32, sample.width, sample.height))
        self.write(sample.before)
        self.file.write(sample.image)
        self.size += length
        self.write(sample.after)

    def write(self, rest: bytes) -> None:
        self.file.write(rest)
        self.size += len(rest)
        self.rest_crc32 = zlib.crc32(rest, self.rest_crc32)

    def finish(self, more: Arrays) -> Arrays:
        """Ends the tar, and writes its record, in which `more` is too."""
        self.write(END)
        columns = zip(*self.rows, strict=True)
        record: Arrays = {
            name: np.array(column, kind) for (name, kind), column in zip(ROW.items(), columns, strict=True)
        }
        record |= more | {"size": np.array(self.size), "rest_crc32": np.array(self.rest_crc32, np.uint32)}
        write_arrays(record_path(self.path), record)
        self.is_finished = True
        return record
