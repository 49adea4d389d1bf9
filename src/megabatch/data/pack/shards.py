"""Images in tars: shards of `megabatch pack` with an index, or WebDataset's shards without one, which are scanned once.

Shards stay open, so no file is opened per image.  Members are never unpacked, so their names need not be trusted.
Shards are read and not memory-mapped: it is equally fast, and a truncated shard or a bad disk raises an error instead
of killing the process.
"""

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from megabatch.data.sources.files import EncodedDataset
from megabatch.data.sources.index import INDEX, TEST, TRAIN, cached_index, ignored_in, once_per_host, read_index
from megabatch.data.sources.tars import CLASSES, is_current, is_tar, list_tars, name_classes, scan
from megabatch.errors import UserError
from megabatch.io.arrays import Arrays, fingerprint
from megabatch.io.reading import MOST_BYTES, Undecodable, decode_json, open_regular, require_file_size
from megabatch.io.tars import Damaged, member_name
from megabatch.ranks.machine import allow_descriptors
from megabatch.text import one_line

UNFINISHED = ".pack.json"  # in a pack that is being written


class Shards:
    """Tars that are opened on first use and then stay open."""

    def __init__(self, paths: Sequence[Path], sizes: NDArray[np.int64]) -> None:
        self.paths, self.sizes = paths, sizes
        self.files: list[FileIO | None] = [None] * len(paths)
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the open files: another process opens its own."""
        return Shards, (self.paths, self.sizes)

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
            raise OSError(f"{self.paths[shard].name} was truncated: it ends before offset {offset + length:,}")
        return content

    def member_name(self, shard: int, offset: int) -> str:
        def read(start: int, length: int) -> bytes:
            return self.read(shard, start, min(length, size - start))

        size = int(self.sizes[shard])
        return member_name(read, size, offset)


class ShardFiles:
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
        require_file_size(int(self.length[number]), most_bytes)
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
        """Return a hash of the shards and of the positions and classes of the samples, but not of their contents."""
        names = np.array([path.name for path in self.shards.paths])
        return fingerprint(names, self.shards.sizes, self.shard, self.offset, self.length, self.labels)


def holds_shards(path: Path) -> bool:
    """Return whether the path is a tar, a pack, or a folder of tars without folders.

    Tars next to folders are probably the archives that these were unpacked from.
    """
    if not path.is_dir():
        return path.is_file() and is_tar(path)
    entries = [entry for entry in path.iterdir() if entry.name in (INDEX, UNFINISHED) or not entry.name.startswith(".")]
    if any(entry.name in (INDEX, UNFINISHED) for entry in entries):
        return True
    return any(is_tar(entry) for entry in entries) and not any(entry.is_dir() for entry in entries)


def read_shards(path: Path) -> EncodedDataset:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a .tar file or a folder of them")
    try:
        if (path / INDEX).exists():
            return to_dataset(path, once_per_host(f"pack {path.resolve()}", lambda: read_index(path)))
        if (path / UNFINISHED).exists():
            raise UserError(f"{path} is an unfinished pack; finish it with the same megabatch pack command")
        shards = list_tars(path)
        index = cached_index("tars", path, lambda: scan(shards, path), lambda index: is_current(index, shards))
        return to_dataset(path, index)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"{error.filename or path} cannot be read ({reason}); check its permissions, or give another"
        ) from error


def to_dataset(path: Path, index: Arrays) -> EncodedDataset:
    folder = path if path.is_dir() else path.parent
    shards = Shards([folder / str(name) for name in index["shards"]], index["sizes"])

    def files(split: int) -> ShardFiles:
        chosen = index["split"] == split
        return ShardFiles(shards, *(index[name][chosen] for name in ("shard", "offset", "length", "label")))

    test = files(TEST)
    names = name_classes(folder / CLASSES, tuple(str(name) for name in index["class_names"]))
    return EncodedDataset(
        class_names=names,
        train=files(TRAIN),
        test=test if len(test) else None,
        place=str(path),
        shorter_side=packed_side(index),
        ignored=ignored_in(index) if "ignored" in index else (),  # a pack has only images
    )


class PackedSide(Struct, frozen=True):
    """The part of a pack's `Identity` that readers need."""

    shorter_side: Annotated[int, Meta(ge=1)] | None = None


def packed_side(index: Arrays) -> int | None:
    """Return the shorter side to which a pack shrank larger images; None for original bytes, or if it is unknown."""
    try:
        return decode_json(str(index.get("identity", "{}")), PackedSide).shorter_side
    except Undecodable:
        return None


def verify(folder: Path, show: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Compare every byte of a pack's shards with the checksums of its index, and return a line for each damaged part.

    `show` is called with the number of images read and their total.
    """
    try:
        if not (folder / INDEX).exists():
            raise UserError(f"{folder} has no {INDEX} and so no checksums; give a finished megabatch pack")
        index = read_index(folder)
        if "rest_crc32" not in index:
            raise UserError(f"{folder / INDEX} has no checksums; pack again")
        shards = Shards([folder / str(name) for name in index["shards"]], index["sizes"])
        damaged: dict[int, list[str]] = {}
        done, total = 0, len(index["label"])
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = {pool.submit(verify_shard, index, shards, shard): shard for shard in range(len(shards.paths))}
            for job in as_completed(jobs):
                num_images, damaged[jobs[job]] = job.result()
                done += num_images
                show(done, total)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be read ({error.strerror or error}); check its permissions"
        ) from error
    return [line for shard in sorted(damaged) for line in damaged[shard]]


def verify_shard(index: Arrays, shards: Shards, shard: int) -> tuple[int, list[str]]:
    """Return the number of images of a shard and a line for each damaged part.

    Each image has a checksum, and all bytes between the images (names, labels, padding) have one together.  They are
    read in one pass in file order.
    """
    chosen = np.flatnonzero(index["shard"] == shard)
    chosen = chosen[np.argsort(index["offset"][chosen])]
    files = ShardFiles(shards, *(index[name][chosen] for name in ("shard", "offset", "length", "label")))
    size = int(shards.sizes[shard])
    damaged: list[str] = []
    rest_crc32, end = 0, 0
    for number, crc32 in enumerate(index["crc32"][chosen]):
        offset = int(files.offset[number])
        if offset < end:
            damaged.append(f"{files.where(number)}: the image overlaps the previous one")
            continue
        rest_crc32 = zlib.crc32(shards.read(shard, end, offset - end), rest_crc32)
        end = offset + int(files.length[number])
        if zlib.crc32(files.content(number)) != crc32:
            damaged.append(f"{files.where(number)}: the image has another checksum")
    if zlib.crc32(shards.read(shard, end, size - end), rest_crc32) != index["rest_crc32"][shard]:
        damaged.append(f"{shards.paths[shard]}: names or labels between its images have another checksum")
    return len(chosen), damaged
