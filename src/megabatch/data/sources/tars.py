"""Finds the samples of WebDataset's tars, which have no index, by reading the headers.

Members with the same path up to the first dot of the file name are one sample: an image (.jpg, .png, ...) and its
class, as text in .cls or as "label" or "cls" in .json.  A class is a number, a name or, in .json, a list of them.  The
name of the shard (imagenet-val-000003.tar) determines the split.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from megabatch.data.sources.files import IMAGE_SUFFIXES
from megabatch.data.sources.index import (
    COLUMNS,
    TEST,
    TRAIN,
    count_ignored,
    ignored_in,
    require_consistent,
    stable_ctime_ns,
)
from megabatch.data.sources.labels import (
    ALL_TEST_WORDS,
    MAX_NAME_LENGTH,
    SEPARATOR,
    TEST_WORDS,
    number_classes,
    require_names,
    words_in,
)
from megabatch.errors import UserError
from megabatch.io.arrays import Arrays
from megabatch.io.reading import open_regular, read_file
from megabatch.io.tars import Damaged, Member, Read, walk_members
from megabatch.text import is_plain, one_line

CLASSES = "classes.txt"
MOST_LABEL_BYTES = 64_000_000  # of classes.txt or of a .json, which may contain more than the label
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
CHUNK_BYTES = 8192
SCANNED = {name: COLUMNS[name] for name in ("shard", "offset", "length", "label", "split")}


class TarSamples(Struct):
    """The samples of one tar, in the order of their images."""

    offsets: list[int]
    lengths: list[int]
    labels: list[str]
    ignored: Counter[str]  # suffixes of members of samples with a label and no image


def read_label(member: Member, extension: str, read: Read, path: Path) -> str | None:
    """Return the number or name of a class as text, or None if a .json has no label."""
    try:
        if member.length > MOST_LABEL_BYTES:
            raise ValueError(f"{member.length:,} bytes; the limit is {MOST_LABEL_BYTES:,}")
        content = member.first_block if len(member.first_block) == member.length else read(member.offset, member.length)
        if extension == "cls":
            label: object = content.decode().strip()
        else:
            fields = msgspec.json.decode(content)
            label = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
            if label is None:
                return None
            if isinstance(label, list) and all(is_listed(name) for name in label):
                label = SEPARATOR.join(map(str, label)) or SEPARATOR
        if isinstance(label, bool) or not isinstance(label, int | str) or label == "" or not is_plain(str(label)):
            raise ValueError(f"{label!r} is neither a number nor a name")
        if len(str(label)) > MAX_NAME_LENGTH:
            raise ValueError(f"{len(str(label)):,} characters; the limit is {MAX_NAME_LENGTH:,}")
    except (ValueError, RecursionError) as error:  # includes errors of msgspec and Unicode, and deeply nested JSON
        where = f"{path} at offset {member.offset} ({one_line(member.name)})"
        raise UserError(
            f"{where} is not a label: {one_line(str(error))}; expected the number or the name of a class, or in .json "
            "a list of them"
        ) from error
    return str(label)


def is_listed(name: object) -> bool:
    """Return whether this may be one of several labels of an image."""
    return type(name) is int or (isinstance(name, str) and bool(name) and SEPARATOR not in name)


def name_classes(path: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines of classes.txt as names of numbered classes, if it has a line for each class."""
    if names != tuple(map(str, range(len(names)))) or not path.is_file():
        return names
    lines = tuple(read_file(path, MOST_LABEL_BYTES).decode("utf-8", "replace").splitlines())
    return require_names(lines, str(path)) if len(lines) >= len(names) else names


def is_tar(path: Path) -> bool:
    return path.name.endswith((".tar", *COMPRESSED)) and not path.name.startswith(".")


def list_tars(path: Path) -> list[Path]:
    entries = sorted(entry for entry in path.iterdir() if is_tar(entry)) if path.is_dir() else [path]
    for entry in entries:
        if entry.name.endswith(COMPRESSED):
            raise UserError(
                f"{entry} is compressed, so images cannot be read from it in random order; decompress it to .tar first"
            )
    if not entries:
        raise UserError(f"{path} has no .tar; give a .tar file or a folder of them")
    if not is_tar(entries[0]):
        raise UserError(f"{path} is not a .tar; give a .tar file or a folder of them")
    return entries


def is_current(index: Arrays, shards: Sequence[Path]) -> bool:
    """Return whether an index from the cache matches the shards.  Raise ValueError if it is damaged."""
    require_consistent(index, SCANNED, "the cache")
    ignored_in(index)
    names, stamps = index["listed"], index["stamps"]
    if names.dtype.kind != "U" or stamps.dtype != np.int64 or stamps.shape != (2, *names.shape):
        return False
    listed = {str(name): (size, ctime_ns) for name, size, ctime_ns in zip(names, *stamps, strict=True)}
    return {shard.name: (shard.stat().st_size, shard.stat().st_ctime_ns) for shard in shards} == listed


def scan(tars: Sequence[Path], place: Path) -> Arrays:
    """Build an index of the samples from the headers of the tars."""
    stamps = np.array([(tar.stat().st_size, stable_ctime_ns(tar)) for tar in tars], np.int64).T
    splits = split_by_name([tar.name for tar in tars]) if place.is_dir() else [TRAIN]
    chosen = [at for at, split in enumerate(splits) if split is not None]
    with ThreadPoolExecutor(8) as pool:  # the threads wait for the disk
        found = list(pool.map(lambda at: scan_tar(tars[at]), chosen))
    counts = [len(samples.labels) for samples in found]
    split = np.repeat([splits[at] for at in chosen], counts).astype(np.uint8)
    if TRAIN not in split:
        raise UserError(f"{place} has no training image; expected {' '.join(IMAGE_SUFFIXES)} members with .cls")
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
        **count_ignored(sum((samples.ignored for samples in found), Counter[str]())),
    }


def split_by_name(names: Sequence[str]) -> list[int | None]:
    """Return the split of each shard by its name, or None for test shards if there are validation shards."""
    words = [words_in(name) for name in names]
    for kinds in TEST_WORDS:
        if any(found & {*kinds} for found in words):
            break
    return [TEST if found & {*kinds} else None if found & {*ALL_TEST_WORDS} else TRAIN for found in words]


def scan_tar(path: Path) -> TarSamples:
    images: dict[str, Member] = {}
    labels: dict[str, str] = {}
    others: dict[str, str] = {}  # the suffix of another member
    with FileIO(path, opener=open_regular) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # only headers are read
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
                        raise UserError(
                            f"{path} has two images of one sample, {other} and {one_line(member.name)}; remove one"
                        )
                    images[key] = member
                elif extension == "cls" or (extension == "json" and key not in labels):
                    label = read_label(member, extension, read, path)
                    if label is not None:
                        labels[key] = label
                elif extension != "json":
                    others[key] = f".{extension}" if extension else ""
        except Damaged as error:
            raise UserError(
                f"{path} is damaged at offset {error.offset} ({error.reason}); download or write it again"
            ) from error
    for key, image in images.items():
        if key not in labels:
            raise UserError(
                f"{path} at offset {image.offset}: the image {one_line(image.name)} has no label; "
                'expected a member of the same name with .cls, or with .json and "label" or "cls" in it'
            )
    found = list(images.values())
    return TarSamples(
        [image.offset for image in found],
        [image.length for image in found],
        [labels[key] for key in images],
        Counter(suffix for key, suffix in others.items() if key in labels and key not in images),
    )


def read_in_chunks(descriptor: int) -> Read:
    """Return a buffered read: a label and the header of the next image are close, so one system call reads both."""
    begin, chunk = 0, b""

    def read(offset: int, length: int) -> bytes:
        nonlocal begin, chunk
        if offset < begin or offset + length > begin + len(chunk):
            begin, chunk = offset, os.pread(descriptor, max(length, CHUNK_BYTES), offset)
        return chunk[offset - begin : offset - begin + length]

    return read
