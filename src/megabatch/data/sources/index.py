"""What was found on disk, kept for the next time: listing a million files takes seconds, on a file server minutes.

An index lies in $XDG_CACHE_HOME/megabatch (or ~/.cache/megabatch) under a hash of what it indexes, and holds what its
validity is judged by.  Ranks that start together take turns on a lock: the first makes the index, the others find it.
Nothing depends on the cache: where there is none, or another user could have written it, the index is made again.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.labels import class_names_of
from megabatch.errors import UserError
from megabatch.io import disk
from megabatch.io.arrays import UNREADABLE, Arrays, read_arrays, write_arrays
from megabatch.io.tars import BLOCK
from megabatch.text import is_plain, one_line

FORMAT = 2  # counts what indexes hold, and what they make of the names of splits
TICK_NS = 20_000_000  # of a file system's clock, at most


def cached_index(kind: str, place: Path, build: Callable[[], Arrays], is_current: Callable[[Arrays], bool]) -> Arrays:
    """The index of `place`, from the cache if it is there and current."""
    digest = hashlib.sha256(os.fsencode(f"{FORMAT} {kind} {place.resolve()}")).hexdigest()[:32]
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


def settled_mtime(path: Path) -> int:
    """When it was last changed, in ns; what is changed after this call has another mtime.

    Two changes within one tick of the file system's clock have the same: where the last is that new, wait it out.
    """
    mtime = path.stat().st_ctime_ns
    if 0 <= time.time_ns() - mtime < TICK_NS:
        time.sleep(TICK_NS / 1e9)
        mtime = path.stat().st_ctime_ns
    return mtime


# index.npz of a pack: where every sample lies, what it is, and its checksum.
#
# Sample i of the index is sample i of what was packed, wherever in the shards it lies.

INDEX = "index.npz"
INDEX_FORMAT = 1
TRAIN, TEST = 0, 1  # its splits
# What the index says of a sample.  A scan of tars without an index finds the first five.
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


LIMITS = np.iinfo(np.int64)


def read_index(folder: Path) -> Arrays:
    """The index of a pack, which fits its shards."""
    path = folder / INDEX
    try:
        index = read_arrays(path)
        found = whole_number(index["format"])
        if found != INDEX_FORMAT:
            raise UserError(f"{path} has format {found}, this megabatch reads {INDEX_FORMAT}; pack again, or update")
        require_consistent(index, COLUMNS, str(path))
        if "rest_crc32" in index and len(whole_numbers(index["rest_crc32"])) != len(index["shards"]):
            raise ValueError("its checksums are not one for each shard")
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
                f"{shard} {state} where {INDEX} says {size:,} bytes: the index does not match its shards; "
                "copy the pack again, or pack again"
            )
    return index


def require_consistent(index: Arrays, columns: dict[str, type[np.integer[Any]]], where: str) -> None:
    """ValueError where an index is none, however it came to be so.  Its columns get the types that they should have.

    All are compared as int64, in which nothing overflows: lengths and offsets are not below 0, and nothing is added up.
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
        raise ValueError("it names a shard that it does not list")
    if sizes.min() < 0 or offset.min() < BLOCK or length.min() < 0 or (length >= sizes[shard] - offset).any():
        raise ValueError("a sample lies outside of its shard")
    if label.min() < 0 or label.max() >= len(class_names_of(index["class_names"], where)):
        raise ValueError("a label has no class name")
    if split.max() > TEST or TRAIN not in split:
        raise ValueError("it has no training images, or a part that is neither training nor test")


def whole_numbers(array: NDArray[Any], limits: np.iinfo[Any] = LIMITS) -> NDArray[Any]:
    """One dimension of integers within limits; ValueError where it is something else."""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"a column is {array.dtype} of shape {array.shape}, not a row of numbers")
    if len(array) and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise ValueError(f"a column has numbers beyond {limits.min} to {limits.max}")
    return array


def whole_number(array: NDArray[Any]) -> int:
    if array.shape != () or array.dtype.kind not in "iu":
        raise ValueError(f"{array.dtype} of shape {array.shape} is not a number")
    return int(array)


def require_file_names(names: NDArray[Any]) -> None:
    if names.ndim != 1 or names.dtype.kind != "U":
        raise ValueError("its shards are no names")
    if any("/" in name or not name or name.startswith(".") or not is_plain(name) for name in names.tolist()):
        raise ValueError("a shard's name is no file name")
