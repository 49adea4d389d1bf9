"""Packs images into shards: few large files that are read at the speed of the disk, at the size that training needs.

OUT/train-000000.tar ...  plain tars in WebDataset's layout: bonsai/00000012-image_0013.jpg, and .cls with its label
    val-000000.tar ...    the same of the test part, if the source has one
    classes.txt           a class name a line, for other readers
    index.npz             where every sample lies, what it is, its checksum; written last: with it, a pack is whole

Sample i of the index is sample i of the source, so training sees the same order and the same crops from either.  In
the shards themselves samples lie in a random order, the same every time, for readers that go through them in a row.

Threads read, decode and encode; one writes, in order.  Whole shards are kept by a kill (see `shard_writer`): the same
command resumes after the last, and what comes out is the same to the byte.
"""

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct, field

from megabatch import disk
from megabatch.data.files import EncodedDataset
from megabatch.data.npz import Arrays, write_arrays
from megabatch.data.order import epoch_order
from megabatch.data.pack_identity import (
    LOCK,
    Identity,
    PackSettings,
    Source,
    identify,
    is_complete,
    parts_of,
    require_place,
)
from megabatch.data.pack_records import PARTS, clean_up, make_index, whole_shards
from megabatch.data.pack_samples import Prefetch, directory_of, make_sample
from megabatch.data.settings import IMAGE_TIMEOUT_S
from megabatch.data.shard_index import INDEX, read_index
from megabatch.data.shard_writer import END, ShardWriter, shard_name, writing_shard
from megabatch.data.shards import UNFINISHED
from megabatch.data.sources import read_encoded
from megabatch.data.tar_labels import CLASSES
from megabatch.data.threads import Threads
from megabatch.errors import UserError
from megabatch.text import one_line

MEGABYTE = 1_000_000
ORDER_SEED = 0x7061636B
PREFETCHED_PER_THREAD = 4  # images that are ready before the writer comes to them


class Progress(Struct):
    """Of the whole pack; `begun_with` images were packed by an earlier command."""

    total: int
    begun_with: int = 0
    images: int = 0  # packed or skipped
    shards: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    skipped: list[str] = field(default_factory=list)  # where each is, and why

    def add(self, record: Arrays) -> None:
        """A whole shard that an earlier command wrote."""
        self.images += len(record["number"]) + len(record["skipped"])
        self.begun_with = self.images
        self.shards += 1
        self.read_bytes += int(record["source_bytes"])
        self.written_bytes += int(record["size"])
        self.skipped += map(str, record["reasons"])


class Packed(Struct, frozen=True, kw_only=True):
    num_images: int
    num_classes: int
    num_shards: int
    written_bytes: int
    progress: Progress | None  # None where it was complete already
    wall_s: float


def pack(
    source: Path,
    out: Path,
    settings: PackSettings,
    show: Callable[[Progress], None] = lambda progress: None,
    read: Callable[[Path], EncodedDataset] = read_encoded,
) -> Packed:
    """`show` is called after every image; `read` says what the source holds."""
    begin_s = time.monotonic()
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise UserError(f"{out} lies inside of {source}, which is to be packed; give a place outside of it")
    dataset = read(source)
    identity = identify(dataset, settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
        require_place(out)
        with disk.take_lock(out / LOCK):
            progress = None
            if not is_complete(out, identity):
                progress = pack_dataset(dataset, out, settings, identity, show)
            clean_up(out)
        index = read_index(out)
    except disk.Locked as error:
        raise UserError(
            f"{out} is being packed by process {error.holder}; wait for it, or give another folder"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{out} cannot be written ({reason}); fix that, and the same command resumes") from error
    return Packed(
        num_images=len(index["label"]),
        num_classes=len(index["class_names"]),
        num_shards=len(index["shards"]),
        written_bytes=int(index["sizes"].sum()),
        progress=progress,
        wall_s=time.monotonic() - begin_s,
    )


def pack_dataset(
    dataset: EncodedDataset, out: Path, settings: PackSettings, identity: Identity, show: Callable[[Progress], None]
) -> Progress:
    disk.remove_unfinished(out)
    disk.write_file(out / UNFINISHED, msgspec.json.encode(identity))
    parts = parts_of(dataset)
    records = [whole_shards(out, part) for part in PARTS[: len(parts)]]
    progress = Progress(total=sum(map(len, parts)))
    for record in itertools.chain(*records):
        progress.add(record)
    directories = [directory_of(name) for name in dataset.class_names]
    num_threads = len(os.sched_getaffinity(0))
    with Threads(num_threads, "megabatch-pack", IMAGE_TIMEOUT_S) as pool:
        for split, files in enumerate(parts):
            num_done = sum(len(record["number"]) + len(record["skipped"]) for record in records[split])
            order = epoch_order(ORDER_SEED, split, len(files))[num_done:]
            make = partial(make_sample, files, directories, settings)
            depth = PREFETCHED_PER_THREAD * num_threads
            prefetch = Prefetch(pool, make, map(int, order), depth, IMAGE_TIMEOUT_S)
            while prefetch.waiting:
                with writing_shard(out / shard_name(PARTS[split], len(records[split]))) as writer:
                    record = write_shard(writer, prefetch, files, settings, progress, show)
                records[split].append(record)
    disk.write_file(out / CLASSES, "".join(f"{name}\n" for name in dataset.class_names))
    write_arrays(out / INDEX, make_index(dataset.class_names, records, identity))
    return progress


def write_shard(
    writer: ShardWriter,
    prefetch: Prefetch,
    files: Source,
    settings: PackSettings,
    progress: Progress,
    show: Callable[[Progress], None],
) -> Arrays:
    """As many samples as fit, and one at least; images that are skipped belong to the shard before them."""
    skipped: list[int] = []
    reasons: list[str] = []
    source_bytes = 0
    while prefetch.waiting:
        number, prepared = prefetch.first()
        if prepared.sample is None:
            where = files.where(number, read=not prepared.is_late)
            reasons.append(f"{where}: {one_line(prepared.reason)}")
            if settings.on_error == "raise":
                raise UserError(f"{reasons[-1]}; --on-error skip leaves such images out")
            skipped.append(number)
            progress.skipped.append(reasons[-1])
        elif writer.rows and writer.size + len(prepared.sample) + len(END) > settings.shard_mb * MEGABYTE:
            break
        else:
            writer.add(number, prepared.sample)
            progress.written_bytes += len(prepared.sample)
        prefetch.take()
        source_bytes += prepared.source_bytes
        progress.images += 1
        progress.read_bytes += prepared.source_bytes
        show(progress)
    if not writer.rows:
        raise UserError(f"none of the {len(files):,} images can be read, the first: {reasons[0]}; fix them")
    progress.shards += 1
    return writer.finish(
        {
            "skipped": np.array(skipped, np.int64),
            "reasons": np.array(reasons, np.str_),
            "source_bytes": np.array(source_bytes),
        }
    )
