"""Packs images into shards: a few large files, read at the speed of the disk, with images at the size for training.

OUT/train-000000.tar ...  plain tars in WebDataset's layout: bonsai/00000012-image_0013.jpg, and .cls with its label
    val-000000.tar ...    the same for the test part, if the source has one
    classes.txt           one class name per line, for other readers
    index.npz             position, class and checksum of every sample; written last, so a pack with it is complete

Sample i of the index is sample i of the source, so training uses the same order and the same crops with either.  In
the shards the samples are in a random but reproducible order, for sequential readers.

Threads read, decode and encode; the caller writes, in order.  A shard is renamed to its final name after it and its
record (.train-000003.npz of train-000003.tar) are on disk.  So a finished shard always has a record, even after a
power failure, and the same command resumes after the last one.  The resulting pack is identical.
"""

import contextlib
import itertools
import os
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct, field

from megabatch.data.catalog import read_encoded
from megabatch.data.pack.identity import (
    LOCK,
    Identity,
    PackSettings,
    Source,
    identify,
    is_complete,
    parts_of,
    require_place,
)
from megabatch.data.pack.shards import UNFINISHED
from megabatch.data.pipeline.decode import Unreadable
from megabatch.data.pipeline.order import epoch_order
from megabatch.data.pipeline.shrink import Stored, prepare
from megabatch.data.pipeline.threads import MAX_ABANDONED, Threads, Watch
from megabatch.data.settings import IMAGE_TIMEOUT_S
from megabatch.data.sources.files import Content, EncodedDataset
from megabatch.data.sources.index import COLUMNS, INDEX, INDEX_FORMAT, read_index, whole_number, whole_numbers
from megabatch.data.sources.tars import CLASSES
from megabatch.errors import UserError
from megabatch.io import disk
from megabatch.io.arrays import UNREADABLE, Arrays, read_arrays, write_arrays
from megabatch.io.tars import BLOCK, Damaged, padded
from megabatch.text import one_line

PARTS = ("train", "val")
MEGABYTE = 1_000_000
ORDER_SEED = 0x7061636B
PREFETCHED_PER_THREAD = 4  # images that are ready for the writer
END = bytes(2 * BLOCK)  # of a tar
BUFFER_BYTES = 1 << 20
LONGEST_FOLDER = 60  # characters of up to 4 bytes, before the number: file systems allow 255 bytes
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
    return path.with_name(f".{path.stem}.npz")


def member_header(name: str, length: int) -> bytes:
    """Return a header without time, owner or other fields that differ between two packs of the same images."""
    member = tarfile.TarInfo(name)
    member.size = length
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


class Sample(Struct, frozen=True):
    """The bytes of a sample in the tar: the image, and the headers and label before and after it."""

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
    """Create a shard for the block to fill and `finish`.  If the block raises, no shard remains."""
    with disk.writing(path) as new, new.open("wb", buffering=BUFFER_BYTES) as file:
        writer = ShardWriter(path, file)
        yield writer
        assert writer.is_finished, f"{path}: the shard has no record"


class ShardWriter:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = 0
        self.rest_crc32 = 0  # of all bytes except the images
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
        """End the tar, and write its record together with `more`."""
        self.write(END)
        columns = zip(*self.rows, strict=True)
        record: Arrays = {
            name: np.array(column, kind) for (name, kind), column in zip(ROW.items(), columns, strict=True)
        }
        record |= more | {"size": np.array(self.size), "rest_crc32": np.array(self.rest_crc32, np.uint32)}
        write_arrays(record_path(self.path), record)
        self.is_finished = True
        return record


def read_records(out: Path, part: str) -> list[Arrays]:
    """Return the records of the shards that an earlier command finished, and remove other shards of this part."""
    records: list[Arrays] = []
    with contextlib.suppress(*UNREADABLE):
        while True:
            path = out / shard_name(part, len(records))
            record = read_arrays(record_path(path))
            require_record(record)
            if path.stat().st_size != record["size"]:
                break
            records.append(record)
    finished = {shard_name(part, shard) for shard in range(len(records))}
    for path in out.glob(f"{part}-*.tar"):
        if path.name not in finished:
            path.unlink()
    return records


def require_record(record: Arrays) -> None:
    """Raise ValueError or KeyError if a record is damaged."""
    columns = [whole_numbers(record[name], np.iinfo(kind)) for name, kind in ROW.items()]
    if len({len(column) for column in columns}) != 1:
        raise ValueError("its columns differ in length")
    reasons = record["reasons"]
    if reasons.dtype.kind != "U" or reasons.shape != whole_numbers(record["skipped"]).shape:
        raise ValueError("the number of reasons differs from that of skipped images")
    for name in ("size", "rest_crc32", "source_bytes"):
        whole_number(record[name])


def make_index(class_names: tuple[str, ...], records: list[list[Arrays]], identity: Identity) -> Arrays:
    """Build index.npz from the records.  `number` is the number of a sample in the source, including skipped images."""
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
    """Remove the files that only an unfinished pack needs."""
    for part in PARTS:
        for path in out.glob(f".{part}-*.npz"):
            path.unlink()
    disk.remove_unfinished(out)
    (out / UNFINISHED).unlink(missing_ok=True)


class Prepared(Struct, frozen=True):
    """A sample, or the reason why there is none."""

    sample: Sample | None
    reason: str
    source_bytes: int
    is_late: bool = False  # the thread that reads it is stuck


class Prefetch:
    """The results of `make` for `numbers`, in order, computed by threads up to `depth` ahead."""

    def __init__(
        self, pool: Threads, make: Callable[[int], Prepared], numbers: Iterable[int], depth: int, timeout_s: float
    ) -> None:
        self.pool, self.make, self.numbers = pool, make, iter(numbers)
        self.waiting: deque[tuple[int, Future[Prepared]]] = deque()
        self.watch = Watch(timeout_s)
        self.late: set[int] = set()
        for _ in range(depth):
            self.submit_next()

    def submit_next(self) -> None:
        number = next(self.numbers, None)
        if number is not None:
            self.waiting.append((number, self.pool.submit(partial(self.watched, number))))

    def watched(self, number: int) -> Prepared:
        self.watch.begin(number)
        try:
            return self.make(number)
        finally:
            self.watch.end()

    def first(self) -> tuple[int, Prepared]:
        number, prepared = self.waiting[0]
        while number not in self.late and (late := self.watch.wait(prepared)):
            self.late |= {task.image for task in late}
            for task in late:
                self.pool.replace(task.thread)
        if self.watch.num_late > MAX_ABANDONED:
            raise UserError(
                f"{self.watch.num_late} images take longer than {self.watch.limit_s:g} s each; "
                "check the disk or file server"
            )
        if number in self.late:
            return number, Prepared(None, f"it takes longer than {self.watch.limit_s:g} s to read", 0, is_late=True)
        return number, prepared.result()

    def take(self) -> None:
        self.waiting.popleft()
        self.submit_next()


def make_sample(files: Source, directories: list[str], settings: PackSettings, number: int) -> Prepared:
    """Read and check an image, shrink it if necessary, and lay it out for the tar."""
    source_bytes, label = 0, int(files.labels[number])
    try:
        content = files.content(number)
        source_bytes = len(content)
        stored = prepare(content, settings.shorter_side, settings.quality)
        stem, _, extension = files.name(number).rpartition("/")[2].rpartition(".")
    except (Unreadable, Damaged, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Prepared(None, reason, source_bytes)
    key = f"{directories[label]}/{number:08d}-{stem.replace('.', '_')}"
    return Prepared(Sample.of(key, stored.suffix or member_suffix(extension), stored, label), "", source_bytes)


def member_suffix(extension: str) -> str:
    """Return the suffix by which WebDataset recognises the image: `jpg` for a JPEG."""
    suffix = f".{extension.lower()}"
    return ".jpg" if suffix == ".jpeg" else suffix


def directory_of(class_name: str, number: int) -> str:
    """Return the folder of a class in the tar, changed if it is not a valid name: the tar may be unpacked."""
    name = class_name.replace("/", "_")
    if len(name) > LONGEST_FOLDER:  # lists of labels may start alike
        name = f"{name[:LONGEST_FOLDER]}-{number}"
    return name if name.strip(".") else "_" * max(1, len(name))


class Progress(Struct):
    total: int
    num_resumed: int = 0  # images that an earlier command packed or skipped
    images: int = 0  # packed or skipped
    shards: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    skipped: list[str] = field(default_factory=list)  # location and reason

    def add(self, record: Arrays) -> None:
        """Add a shard that an earlier command finished."""
        self.images += len(record["number"]) + len(record["skipped"])
        self.num_resumed = self.images
        self.shards += 1
        self.read_bytes += int(record["source_bytes"])
        self.written_bytes += int(record["size"])
        self.skipped += map(str, record["reasons"])


class Packed(Struct, frozen=True, kw_only=True):
    num_images: int
    num_classes: int
    num_shards: int
    written_bytes: int
    progress: Progress | None  # None if the pack was complete before
    wall_s: float


def pack(
    source: Path,
    out: Path,
    settings: PackSettings,
    show: Callable[[Progress], None] = lambda progress: None,
    read: Callable[[Path], EncodedDataset] = read_encoded,
) -> Packed:
    """Pack the images that `read` finds in `source`.  `show` is called after every image."""
    begin_s = time.monotonic()
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise UserError(f"{out} is inside {source}, the source; give a folder outside of it")
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
        raise UserError(
            f"{out} cannot be written ({reason}); {disk.remedy(error)}, then resume with the same command"
        ) from error
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
    records = [read_records(out, part) for part in PARTS[: len(parts)]]
    progress = Progress(total=sum(map(len, parts)))
    for record in itertools.chain(*records):
        progress.add(record)
    directories = [directory_of(name, number) for number, name in enumerate(dataset.class_names)]
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
    """Write as many samples as fit, but at least one.  Skipped images belong to the shard before them."""
    skipped: list[int] = []
    reasons: list[str] = []
    source_bytes = 0
    while prefetch.waiting:
        number, prepared = prefetch.first()
        if prepared.sample is None:
            where = files.where(number, read=not prepared.is_late)
            reasons.append(f"{where}: {one_line(prepared.reason)}")
            if settings.on_error == "raise":
                raise UserError(f"{reasons[-1]}; fix or remove it, or skip such images with --on-error skip")
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
        raise UserError(f"none of the {len(files):,} images can be read; the first is {reasons[0]}; check the files")
    progress.shards += 1
    return writer.finish(
        {
            "skipped": np.array(skipped, np.int64),
            "reasons": np.array(reasons, np.str_),
            "source_bytes": np.array(source_bytes),
        }
    )
