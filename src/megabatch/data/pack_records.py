"""The records of a pack's whole shards: what a command after a kill resumes from, and what the index is made of."""

import contextlib
import itertools
from pathlib import Path

import msgspec
import numpy as np

from megabatch import disk
from megabatch.data.npz import UNREADABLE, Arrays, read_arrays
from megabatch.data.pack_identity import Identity
from megabatch.data.shard_index import COLUMNS, INDEX_FORMAT, whole_number, whole_numbers
from megabatch.data.shard_writer import ROW, record_path, shard_name
from megabatch.data.shards import UNFINISHED

PARTS = ("train", "val")


def whole_shards(out: Path, part: str) -> list[Arrays]:
    """The records of the shards that an earlier command finished; other shards of this part are removed."""
    records: list[Arrays] = []
    with contextlib.suppress(*UNREADABLE):
        while True:
            path = out / shard_name(part, len(records))
            record = read_arrays(record_path(path))
            require_record(record)
            if path.stat().st_size != record["size"]:
                break
            records.append(record)
    kept = {shard_name(part, shard) for shard in range(len(records))}
    for path in out.glob(f"{part}-*.tar"):
        if path.name not in kept:
            path.unlink()
    return records


def require_record(record: Arrays) -> None:
    """ValueError or KeyError where it is none."""
    columns = [whole_numbers(record[name], np.iinfo(kind)) for name, kind in ROW.items()]
    if len({len(column) for column in columns}) != 1:
        raise ValueError("its columns differ in length")
    reasons = record["reasons"]
    if reasons.dtype.kind != "U" or reasons.shape != whole_numbers(record["skipped"]).shape:
        raise ValueError("what was skipped is not one reason each")
    for name in ("size", "rest_crc32", "source_bytes"):
        whole_number(record[name])


def make_index(class_names: tuple[str, ...], records: list[list[Arrays]], identity: Identity) -> Arrays:
    """See `shard_index`.  `number` is the sample's in the source: its own too, unless images before it were skipped."""
    shards = list(itertools.chain(*records))
    names = [
        shard_name(part, shard) for part, found in zip(PARTS, records, strict=False) for shard in range(len(found))
    ]
    counts = [len(record["number"]) for record in shards]
    columns: Arrays = {name: np.concatenate([record[name] for record in shards]) for name in ROW}
    columns["shard"] = np.repeat(np.arange(len(shards)), counts)
    columns["split"] = np.repeat([split for split, found in enumerate(records) for _ in found], counts)
    order = np.lexsort((columns["number"], columns["split"]))
    return {
        "format": np.array(INDEX_FORMAT),
        "identity": np.array(msgspec.json.encode(identity).decode()),
        "class_names": np.array(class_names),
        "shards": np.array(names),
        "sizes": np.array([record["size"] for record in shards], np.int64),
        "rest_crc32": np.array([record["rest_crc32"] for record in shards], np.uint32),
        "number": columns["number"][order],
        **{name: columns[name][order].astype(kind) for name, kind in COLUMNS.items()},
    }


def clean_up(out: Path) -> None:
    """What only an unfinished pack needs."""
    for part in PARTS:
        for path in out.glob(f".{part}-*.npz"):
            path.unlink()
    disk.remove_unfinished(out)
    (out / UNFINISHED).unlink(missing_ok=True)
