"""Indexes of data sets: a cache of folder listings and tar scans, and the index.npz of a pack.

Listing a million files takes seconds, on a file server minutes.  So the result is cached in $XDG_CACHE_HOME/megabatch
(or ~/.cache/megabatch), under a hash of the path, with the times or sizes that show whether it is still valid.  Ranks
that start together take a lock: the first one builds the index, the others read it.  Without a cache, or if another
user could write to it, the index is built again.

index.npz of a pack has the position, class and checksum of every sample.  Sample i of the index is sample i of the
source, at any position in the shards.
"""

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.labels import parse_class_names
from megabatch.errors import UserError
from megabatch.io import disk
from megabatch.io.arrays import UNREADABLE, Arrays, read_arrays, write_arrays
from megabatch.io.tars import BLOCK
from megabatch.text import is_plain, one_line

FORMAT = 4  # of cached indexes; increased when their contents, the suffixes or the rules for split names change
TICK_NS = 20_000_000  # upper bound of the resolution of a file system's clock
INDEX = "index.npz"
INDEX_FORMAT = 1
TRAIN, TEST = 0, 1  # splits
# The columns of index.npz.  A scan of tars without an index finds the first five.
COLUMNS: dict[str, type[np.integer[Any]]] = {
    "shard": np.int32,
    "offset": np.int64,
    "length": np.int64,
    "label": np.int64,
    "split": np.uint8,
    "crc32": np.uint32,
    "width": np.int32,
    "height": np.int32,
}
INT64 = np.iinfo(np.int64)


class Shared:
    """Arrays that one process of a host computes, and the others read from its memory.

    Checking the index of ImageNet takes 2,002 requests to a file server, and reading it 58 MB, for every rank.

    Args:
        offered: The files with the arrays of the first process, by key. None in that process itself.
    """

    def __init__(self, offered: dict[str, str] | None) -> None:
        self.offered = offered
        self.files: dict[str, int] = {}  # the descriptors of this process

    def get(self, key: str, compute: Callable[[], Arrays]) -> Arrays:
        if self.offered is not None:
            with contextlib.suppress(KeyError, *UNREADABLE):  # the first process may have failed, or ended
                return read_arrays(Path(self.offered[key]))
            return compute()
        arrays = compute()
        self.files[key] = descriptor = os.memfd_create("megabatch-index")
        with open(descriptor, "wb", closefd=False) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        return arrays

    def offer(self) -> dict[str, str]:
        """Return the files with the arrays of this process.  They exist until it closes them."""
        return {key: f"/proc/{os.getpid()}/fd/{descriptor}" for key, descriptor in self.files.items()}

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files = {}


SHARED: ContextVar[Shared | None] = ContextVar("SHARED", default=None)


def once_per_host(key: str, compute: Callable[[], Arrays]) -> Arrays:
    """Return `compute()`, or its result in the first process of this host if one shares its arrays with this one."""
    shared = SHARED.get()
    return compute() if shared is None else shared.get(key, compute)


def cached_index(kind: str, place: Path, build: Callable[[], Arrays], is_current: Callable[[Arrays], bool]) -> Arrays:
    """Return the index of `place`, from the cache if it is there and current."""
    digest = hashlib.sha256(os.fsencode(f"{FORMAT} {kind} {place.resolve()}")).hexdigest()[:32]
    return once_per_host(f"{kind}-{digest}", lambda: find_or_build(kind, digest, build, is_current))


def find_or_build(kind: str, digest: str, build: Callable[[], Arrays], is_current: Callable[[Arrays], bool]) -> Arrays:
    folder = disk.cache_folder()
    if folder is None:
        return build()
    path = folder / f"{kind}-{digest}.npz"
    found = read_current(path, is_current)
    if found is not None:
        return found
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # without a lock, several may build it
            held.enter_context(disk.take_lock(path.with_suffix(".lock"), wait=True))
            found = read_current(path, is_current)
        if found is None:
            found = build()
            with contextlib.suppress(OSError):
                write_arrays(path, found, is_private=True)
    return found


def read_current(path: Path, is_current: Callable[[Arrays], bool]) -> Arrays | None:
    try:
        arrays = read_arrays(path)
        return arrays if is_current(arrays) else None
    except UNREADABLE:
        return None


LONGEST_SUFFIX = 20  # characters shown


def count_ignored(ignored: Counter[str]) -> Arrays:
    """Return the part of a cached index with the suffixes of files that are not images, the most frequent first."""
    ordered = sorted(ignored.items(), key=lambda entry: (-entry[1], entry[0]))  # folders have no order
    return {
        "ignored": np.array([one_line(suffix, LONGEST_SUFFIX) for suffix, _ in ordered], np.str_),
        "ignored_counts": np.array([count for _, count in ordered], np.int64),
    }


def ignored_in(index: Arrays) -> tuple[tuple[str, int], ...]:
    """Return the suffixes of a cached index with their counts.  Raise ValueError if they are damaged."""
    ignored, counts = index["ignored"], index["ignored_counts"]
    if ignored.dtype.kind != "U" or ignored.ndim != 1 or counts.dtype != np.int64 or counts.shape != ignored.shape:
        raise ValueError("the number of suffixes differs from that of their counts")
    return tuple(zip(ignored.tolist(), counts.tolist(), strict=True))


def stable_ctime_ns(path: Path) -> int:
    """Return the time of the last change, in ns.  Any change after this call has another time.

    Two changes within one tick of the file system's clock have the same time, so wait if the last one is that recent.
    """
    ctime_ns = path.stat().st_ctime_ns
    if 0 <= time.time_ns() - ctime_ns < TICK_NS:
        time.sleep(TICK_NS / 1e9)
        ctime_ns = path.stat().st_ctime_ns
    return ctime_ns


def read_index(folder: Path) -> Arrays:
    """Read the index of a pack and check that it matches the shards."""
    path = folder / INDEX
    try:
        index = read_arrays(path)
        found = whole_number(index["format"])
        if found != INDEX_FORMAT:
            raise UserError(
                f"{path} has format {found}, but this megabatch reads format {INDEX_FORMAT}; pack again, or update"
            )
        require_consistent(index, COLUMNS, str(path))
        if "rest_crc32" in index and len(whole_numbers(index["rest_crc32"])) != len(index["shards"]):
            raise ValueError("the number of checksums differs from that of shards")
    except (PermissionError, UserError):
        raise
    except UNREADABLE as error:
        raise UserError(f"{path} is damaged ({one_line(str(error))}); pack again") from error
    for name, size in zip(index["shards"], index["sizes"], strict=True):
        shard = folder / str(name)
        found_size = shard.stat().st_size if shard.exists() else None
        if found_size != size:
            state = "is missing" if found_size is None else f"has {found_size:,} bytes"
            raise UserError(
                f"{shard} {state}, but {INDEX} expects {size:,} bytes, so the index does not match its shards; "
                "copy the pack again, or pack again"
            )
    return index


def require_consistent(index: Arrays, columns: dict[str, type[np.integer[Any]]], where: str) -> None:
    """Cast the columns to their types.  Raise ValueError if the index is damaged in any way.

    Columns are compared as int64.  This cannot overflow: lengths and offsets are not negative, and none are added.
    """
    for name, kind in columns.items():
        index[name] = whole_numbers(index[name], np.iinfo(kind)).astype(kind, copy=False)
    shard, offset, length, label, split = (index[name] for name in ("shard", "offset", "length", "label", "split"))
    if any(len(index[name]) != len(shard) for name in columns):
        raise ValueError("its columns differ in length")
    if not len(shard):
        raise ValueError("it lists no image")
    index["sizes"] = sizes = whole_numbers(index["sizes"]).astype(np.int64, copy=False)
    require_file_names(index["shards"])
    if shard.min() < 0 or shard.max() >= len(index["shards"]) or len(index["shards"]) != len(sizes):
        raise ValueError("it refers to a shard that it does not list")
    if sizes.min() < 0 or offset.min() < BLOCK or length.min() < 0 or (length >= sizes[shard] - offset).any():
        raise ValueError("a sample is outside of its shard")
    if label.min() < 0 or label.max() >= len(parse_class_names(index["class_names"], where)):
        raise ValueError("a label has no class name")
    if split.max() > TEST or TRAIN not in split:
        raise ValueError("it has no training images, or a split that is neither training nor test")


def whole_numbers(array: NDArray[Any], limits: np.iinfo[Any] = INT64) -> NDArray[Any]:
    """Return the array.  Raise ValueError unless it is one-dimensional, with integers within the limits."""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"a column is {array.dtype} of shape {array.shape}, not a row of integers")
    if len(array) and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise ValueError(f"a column has numbers outside of {limits.min} to {limits.max}")
    return array


def whole_number(array: NDArray[Any]) -> int:
    if array.shape != () or array.dtype.kind not in "iu":
        raise ValueError(f"{array.dtype} of shape {array.shape} is not an integer")
    return int(array)


def require_file_names(names: NDArray[Any]) -> None:
    if names.ndim != 1 or names.dtype.kind != "U":
        raise ValueError("its shards are not names")
    if any("/" in name or not name or name.startswith(".") or not is_plain(name) for name in names.tolist()):
        raise ValueError("the name of a shard is not a file name")
