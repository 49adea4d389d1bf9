"""index.npz of a pack: where every sample lies, what it is, and its checksum.

Sample i of the index is sample i of what was packed, wherever in the shards it lies.
"""

from pathlib import Path

import numpy as np

from megabatch.data.npz import UNREADABLE, Arrays, read_arrays
from megabatch.data.tars import BLOCK
from megabatch.errors import UserError
from megabatch.text import one_line

INDEX = "index.npz"
INDEX_FORMAT = 1
TRAIN, TEST = 0, 1  # its splits
# What the index says of a sample.  A scan of tars without an index finds the first five.
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
