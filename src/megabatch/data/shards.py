"""Images in tars: shards of `megabatch pack` with their index, or WebDataset's shards without one.

A sample is some bytes of a shard that stays open: no file is opened per image, and members are never unpacked, so that
what they are called does not matter.  (Shards are read and not mapped into memory: it takes as long, and a shard that
is truncated or lies on a bad disk is an error that can be told, where a map would kill the process.)

With index.npz, sample i of the pack is sample i of what was packed, wherever in the shards it lies.  Without it, the
headers are scanned once.  As in WebDataset, members with the same path up to the first dot of the file name are one
sample: an image (.jpg, .png, ...), and its class as text in .cls, or as "label" or "cls" in .json.  The shard's name
says which part it belongs to (imagenet-val-000003.tar).
"""

import os
import re
import resource
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from megabatch.data.files import IMAGE_SUFFIXES, Library
from megabatch.data.index_cache import cached_index, settled_mtime
from megabatch.data.names import is_plain, one_line
from megabatch.data.npz import UNREADABLE, Arrays, fingerprint, read_arrays
from megabatch.data.shapes import MOST_CLASSES
from megabatch.data.tars import BLOCK, Damaged, Member, Read, member_name, walk_members
from megabatch.errors import UserError

INDEX, CLASSES, UNFINISHED = "index.npz", "classes.txt", ".pack.json"
INDEX_FORMAT = 1
TRAIN, TEST = 0, 1  # an index's splits
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
TEST_WORDS = (("val", "valid", "validation"), ("test",))  # shards of the latter count where none of the former is
SPARE_DESCRIPTORS = 512
CHUNK_BYTES = 8192
# What the index says of a sample.  A scan finds the first five.
COLUMNS = {
    "shard": np.int32,
    "offset": np.int64,
    "length": np.int64,
    "label": np.int64,
    "split": np.uint8,
    "crc32": np.uint32,
    "width": np.int32,
    "height": np.int32,
}


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
                found = self.files[shard] = FileIO(self.paths[shard])
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

    def content(self, number: int) -> bytes:
        return self.shards.read(int(self.shard[number]), int(self.offset[number]), int(self.length[number]))

    def where(self, number: int) -> str:
        shard, offset = int(self.shard[number]), int(self.offset[number])
        return f"{self.shards.paths[shard]} at offset {offset} ({self.readable_name(number)})"

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


def is_tar(path: Path) -> bool:
    return path.name.endswith((".tar", *COMPRESSED)) and not path.name.startswith(".")


def read_shards(path: Path) -> Library:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a .tar file, or a folder of them")
    try:
        if (path / INDEX).exists():
            return library_of(path, read_index(path))
        if (path / UNFINISHED).exists():
            raise UserError(f"{path} is a pack that was not finished; finish it with the same megabatch pack command")
        shards = list_tars(path)
        index = cached_index("tars", path, lambda: scan(shards, path), lambda index: is_current(index, shards))
        return library_of(path, index)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{error.filename or path} cannot be read ({reason}); mend that, or give another") from error


def library_of(path: Path, index: Arrays) -> Library:
    folder = path if path.is_dir() else path.parent
    shards = Shards([folder / str(name) for name in index["shards"]], index["sizes"])

    def files(split: int) -> ShardFiles:
        chosen = index["split"] == split
        return ShardFiles(shards, *(index[name][chosen] for name in ("shard", "offset", "length", "label")))

    test = files(TEST)
    names = name_classes(folder / CLASSES, tuple(str(name) for name in index["class_names"]))
    return Library(class_names=names, train=files(TRAIN), test=test if len(test) else None, place=str(path))


def name_classes(path: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """The lines of classes.txt for classes that have only numbers, if it has a line for each."""
    if names != tuple(map(str, range(len(names)))) or not path.is_file():
        return names
    lines = tuple(path.read_text("utf-8", "replace").splitlines())
    return lines if len(lines) >= len(names) else names


# --- with an index


def read_index(folder: Path) -> Arrays:
    """The index of a pack, which fits its shards."""
    path = folder / INDEX
    try:
        index = read_arrays(path)
        if int(index["format"]) != INDEX_FORMAT:
            raise UserError(
                f"{path} has format {int(index['format'])}, this megabatch reads {INDEX_FORMAT}; pack again, or update"
            )
        require_consistent(index)
    except (PermissionError, UserError):
        raise
    except UNREADABLE as error:
        raise UserError(f"{path} is damaged ({one_line(str(error))}); pack again") from error
    for name, size in zip(index["shards"], index["sizes"], strict=True):
        shard = folder / str(name)
        found = shard.stat().st_size if shard.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes"
            raise UserError(
                f"{shard} {state} where {INDEX} says {size:,} bytes: the index does not match its shards; "
                "copy the pack again, or pack again"
            )
    return index


def require_consistent(index: Arrays) -> None:
    """ValueError where an index is none, however it came to be so."""
    columns = [index[name] for name in COLUMNS]
    if any(column.shape != columns[0].shape or column.ndim != 1 for column in columns):
        raise ValueError("its columns differ in length")
    if not len(columns[0]) or any(column.dtype.kind not in "iu" for column in columns):
        raise ValueError("its columns are no numbers")
    if any("/" in str(name) or str(name).startswith(".") for name in index["shards"]):
        raise ValueError("a shard's name is no file name")
    shard, offset, length, label = columns[:4]
    if shard.min() < 0 or shard.max() >= len(index["shards"]) or len(index["shards"]) != len(index["sizes"]):
        raise ValueError("it names a shard that it does not list")
    if offset.min() < BLOCK or length.min() < 0 or (length >= index["sizes"][shard] - offset).any():
        raise ValueError("a sample lies outside of its shard")
    if label.min() < 0 or label.max() >= len(index["class_names"]):
        raise ValueError("a label has no class name")


# --- without one


class Found(Struct):
    """The samples of one shard, in the order of their images."""

    offsets: list[int]
    lengths: list[int]
    labels: list[str]


def list_tars(path: Path) -> list[Path]:
    entries = sorted(entry for entry in path.iterdir() if is_tar(entry)) if path.is_dir() else [path]
    for entry in entries:
        if entry.name.endswith(COMPRESSED):
            raise UserError(
                f"{entry} is compressed, so images cannot be read from it at random; unpack it to .tar first"
            )
    if not entries:
        raise UserError(f"{path} holds no .tar; give a .tar file, or a folder of them")
    if not is_tar(entries[0]):
        raise UserError(f"{path} is no .tar; give a .tar file, or a folder of them")
    return entries


def is_current(index: Arrays, shards: Sequence[Path]) -> bool:
    listed = {str(name): (size, mtime) for name, size, mtime in zip(index["listed"], *index["stamps"], strict=True)}
    return {shard.name: (shard.stat().st_size, shard.stat().st_ctime_ns) for shard in shards} == listed


def scan(tars: Sequence[Path], place: Path) -> Arrays:
    """What an index says of every sample, from the headers of the tars."""
    stamps = np.array([(tar.stat().st_size, settled_mtime(tar)) for tar in tars], np.int64).T
    splits = split_by_name([tar.name for tar in tars]) if place.is_dir() else [TRAIN]
    chosen = [at for at, split in enumerate(splits) if split is not None]
    with ThreadPoolExecutor(8) as pool:  # it is the disk that they wait for
        found = list(pool.map(lambda at: scan_tar(tars[at]), chosen))
    counts = [len(samples.labels) for samples in found]
    split = np.repeat([splits[at] for at in chosen], counts).astype(np.uint8)
    if TRAIN not in split:
        raise UserError(f"{place} holds no image for training; expected {' '.join(IMAGE_SUFFIXES)} members with .cls")
    class_names, labels = number_classes([label for samples in found for label in samples.labels], place)
    return {
        "listed": np.array([tar.name for tar in tars]),
        "stamps": stamps,
        "shards": np.array([tars[at].name for at in chosen]),
        "sizes": stamps[0][chosen],
        "class_names": np.array(class_names),
        "shard": np.repeat(np.arange(len(chosen), dtype=np.int32), counts),
        "offset": np.array([offset for samples in found for offset in samples.offsets], np.int64),
        "length": np.array([length for samples in found for length in samples.lengths], np.int64),
        "label": labels,
        "split": split,
    }


def split_by_name(names: Sequence[str]) -> list[int | None]:
    """The part that each shard belongs to by a word of its name; None for test shards where there are others to val."""
    words = [{re.sub(r"\d+$", "", word) for word in re.split(r"[-_.]", name.lower())} for name in names]
    for kinds in TEST_WORDS:
        if any(found & set(kinds) for found in words):
            break
    every = {word for words in TEST_WORDS for word in words}
    return [TEST if found & set(kinds) else None if found & every else TRAIN for found in words]


def scan_tar(path: Path) -> Found:
    images: dict[str, Member] = {}
    labels: dict[str, str] = {}
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # it jumps from header to header
        read = read_in_chunks(file.fileno())
        try:
            for member in walk_members(read, path.stat().st_size):
                folder, slash, file_name = member.name.rpartition("/")
                stem, _, extension = file_name.partition(".")
                if not stem:
                    continue
                key, extension = f"{folder}{slash}{stem}", extension.lower()
                if f".{extension}" in IMAGE_SUFFIXES:
                    if key in images:
                        other = one_line(images[key].name)
                        raise UserError(f"{path} has two images of one sample, {other} and {one_line(member.name)}")
                    images[key] = member
                elif extension == "cls" or (extension == "json" and key not in labels):
                    label = read_label(member, extension, read, path)
                    if label is not None:
                        labels[key] = label
        except Damaged as error:
            raise UserError(f"{path} is damaged at offset {error.offset} ({error.reason}); fetch it again") from error
    for key, image in images.items():
        if key not in labels:
            raise UserError(
                f"{path} at offset {image.offset}: the image {one_line(image.name)} has no label; "
                'expected a member .cls, or .json with "label" or "cls", of the same name beside it'
            )
    found = list(images.values())
    return Found([image.offset for image in found], [image.length for image in found], [labels[key] for key in images])


def read_in_chunks(descriptor: int) -> Read:
    """A label and the header of the next image lie close to each other: one call of the system for both."""
    begin, chunk = 0, b""

    def read(offset: int, length: int) -> bytes:
        nonlocal begin, chunk
        if offset < begin or offset + length > begin + len(chunk):
            begin, chunk = offset, os.pread(descriptor, max(length, CHUNK_BYTES), offset)
        return chunk[offset - begin : offset - begin + length]

    return read


def read_label(member: Member, extension: str, read: Read, path: Path) -> str | None:
    """An int or a class name, as text; None where a .json says nothing of it."""
    content = member.beginning if len(member.beginning) == member.length else read(member.offset, member.length)
    try:
        if extension == "cls":
            label: object = content.decode().strip()
        else:
            fields = msgspec.json.decode(content)
            label = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
            if label is None:
                return None
        if isinstance(label, bool) or not isinstance(label, int | str) or label == "" or not is_plain(str(label)):
            raise ValueError(f"{label!r} is neither a number nor a name")
    except ValueError as error:  # msgspec's and Unicode's errors too
        where = f"{path} at offset {member.offset} ({one_line(member.name)})"
        raise UserError(
            f"{where} is no label: {one_line(str(error))}; expected the number or the name of a class"
        ) from error
    return str(label)


def number_classes(labels: Sequence[str], place: Path) -> tuple[list[str], NDArray[np.int64]]:
    """Class names, and each sample's class.  Where all are numbers they are the classes' numbers."""
    distinct = sorted(set(labels))
    if not all(re.fullmatch(r"-?[0-9]+", label) for label in distinct):
        number_of = {name: number for number, name in enumerate(distinct)}
        return distinct, np.array([number_of[label] for label in labels], np.int64)
    number_of = {label: int(label) for label in distinct}
    lowest, highest = min(number_of.values()), max(number_of.values())
    if lowest < 0 or highest >= MOST_CLASSES:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"{place} has a label {wrong}; labels number the classes from 0 to {MOST_CLASSES - 1}")
    return [str(number) for number in range(highest + 1)], np.array([number_of[label] for label in labels], np.int64)
