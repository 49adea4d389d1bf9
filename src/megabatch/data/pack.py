"""Packs images into shards: few large files that are read at the speed of the disk, at the size that training needs.

OUT/train-000000.tar ...  plain tars in WebDataset's layout: bonsai/00000012-image_0013.jpg, and .cls with its label
    val-000000.tar ...    the same of the test part, if the source has one
    classes.txt           a class name a line, for other readers
    index.npz             where every sample lies, what it is, its checksum; written last: with it, a pack is whole

Sample i of the index is sample i of the source, so training sees the same order and the same crops from either.  In
the shards themselves samples lie in a random order, the same every time, for readers that go through them in a row.

Threads read, decode and encode; one writes, in order.  Whole shards are kept by a kill (see `shard_writer`): the same
command goes on behind the last, and what comes out is the same to the byte.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct, field

from megabatch.data.decode import Unreadable
from megabatch.data.files import Library
from megabatch.data.folders import FolderFiles
from megabatch.data.names import one_line
from megabatch.data.npz import UNREADABLE, WRITING, Arrays, read_arrays, write_arrays, write_whole
from megabatch.data.order import epoch_order
from megabatch.data.shard_writer import END, ROW, Sample, ShardWriter, record_path, shard_name
from megabatch.data.shards import (
    CLASSES,
    COLUMNS,
    INDEX,
    INDEX_FORMAT,
    UNFINISHED,
    ShardFiles,
    read_index,
)
from megabatch.data.shrink import prepare
from megabatch.data.sources import read_library
from megabatch.data.tars import Damaged
from megabatch.errors import UserError

Source = FolderFiles | ShardFiles

PARTS = ("train", "val")
LOCK = ".pack.lock"
MEGABYTE = 1_000_000
ORDER_SEED = 0x7061636B
AHEAD_PER_THREAD = 4  # images that are ready before the writer comes to them


class PackSettings(Struct, frozen=True, kw_only=True):
    shorter_side: int | None = None  # of images that are larger; None leaves all as they are
    quality: int = 90  # of those that are made smaller
    shard_mb: int = 256
    on_error: Literal["raise", "skip"] = "raise"


class Identity(Struct, frozen=True, kw_only=True):
    """What decides every byte of a pack."""

    source: str  # its name, for messages; the fingerprint decides
    fingerprint: str
    shorter_side: int | None
    quality: int
    shard_mb: int


class Progress(Struct):
    """Of the whole pack; `begun_with` images were there before."""

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
    source: Path, out: Path, settings: PackSettings, show: Callable[[Progress], None] = lambda progress: None
) -> Packed:
    """`show` is called after every image."""
    begin_s = time.monotonic()
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{out} lies inside of {source}, which is to be packed; give a place outside of it")
    library = read_library(source)
    identity = identify(library, settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
        require_place(out)
        with held(out):
            progress = None
            if not is_complete(out, identity):
                progress = pack_library(library, out, settings, identity, show)
            clean_up(out)
        index = read_index(out)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{out} cannot be written ({reason}); mend that, and the same command goes on") from error
    return Packed(
        num_images=len(index["label"]),
        num_classes=len(index["class_names"]),
        num_shards=len(index["shards"]),
        written_bytes=int(index["sizes"].sum()),
        progress=progress,
        wall_s=time.monotonic() - begin_s,
    )


def identify(library: Library, settings: PackSettings) -> Identity:
    parts = [files.fingerprint() for files in parts_of(library)]
    text = "\n".join([*parts, *library.class_names])
    return Identity(
        source=one_line(Path(library.place).name),
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        shorter_side=settings.shorter_side,
        quality=settings.quality,
        shard_mb=settings.shard_mb,
    )


def parts_of(library: Library) -> list[Source]:
    parts = [library.train] if library.test is None else [library.train, library.test]
    assert all(isinstance(files, Source) for files in parts)
    return parts  # type: ignore[return-value]


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """The folder for this process alone; the kernel lets go of it however the process ends."""
    with (out / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out} is being packed by another process; wait for it, or give another folder") from None
        yield


def require_place(out: Path) -> None:
    """A pack, one that was begun, or nothing."""
    ours = (LOCK, INDEX, UNFINISHED)
    names = [path.name for path in out.iterdir() if not path.name.startswith(WRITING)]
    if names and not set(names) & set(ours):
        raise UserError(f"{out} is not empty and no pack ({min(names)}); give a folder that is new or empty")


def is_complete(out: Path, asked: Identity) -> bool:
    """Whether OUT holds this very pack.  Another is refused, whole or begun."""
    try:
        if (out / INDEX).exists():
            found = str(read_index(out)["identity"]).encode()
        elif (out / UNFINISHED).exists():
            found = (out / UNFINISHED).read_bytes()
        else:
            return False
        require_same(out, msgspec.json.decode(found, type=Identity), asked)
    except (KeyError, msgspec.MsgspecError) as error:
        raise UserError(f"{out} does not say how it was packed ({error}); delete it, or give another") from error
    return (out / INDEX).exists()


def require_same(out: Path, made: Identity, asked: Identity) -> None:
    for key in ("shorter_side", "quality", "shard_mb"):
        before, now = getattr(made, key), getattr(asked, key)
        if before != now:
            option = "--" + key.replace("_", "-")
            raise UserError(
                f"{out} was packed with {option} {before or 'not given'}, now it is {now or 'not given'}; "
                f"give the same, another folder, or delete {out}"
            )
    if made.fingerprint != asked.fingerprint:
        raise UserError(
            f"{out} was packed from {made.source!r} when other files were there than are in {asked.source!r} now; "
            f"give another folder, or delete {out}"
        )


class Made(Struct, frozen=True):
    """What became of one image; without a sample, the reason."""

    sample: Sample | None
    reason: str
    source_bytes: int


class Ahead:
    """What `make` makes of `numbers`, in their order; threads are up to `depth` ahead of what is taken."""

    def __init__(
        self, pool: ThreadPoolExecutor, make: Callable[[int], Made], numbers: Iterable[int], depth: int
    ) -> None:
        self.pool, self.make, self.numbers = pool, make, iter(numbers)
        self.waiting: deque[tuple[int, Future[Made]]] = deque()
        for _ in range(depth):
            self.submit_next()

    def submit_next(self) -> None:
        number = next(self.numbers, None)
        if number is not None:
            self.waiting.append((number, self.pool.submit(self.make, number)))

    def first(self) -> tuple[int, Made]:
        number, made = self.waiting[0]
        return number, made.result()

    def take(self) -> None:
        self.waiting.popleft()
        self.submit_next()


def pack_library(
    library: Library, out: Path, settings: PackSettings, identity: Identity, show: Callable[[Progress], None]
) -> Progress:
    write_whole(out / UNFINISHED, msgspec.json.encode(identity))
    parts = parts_of(library)
    records = [whole_shards(out, part) for part in PARTS[: len(parts)]]
    progress = Progress(total=sum(map(len, parts)))
    for record in itertools.chain(*records):
        progress.add(record)
    directories = [directory_of(name) for name in library.class_names]
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as pool:
        for split, files in enumerate(parts):
            num_done = sum(len(record["number"]) + len(record["skipped"]) for record in records[split])
            order = epoch_order(ORDER_SEED, split, len(files))[num_done:]
            make = partial(make_sample, files, directories, settings)
            ahead = Ahead(pool, make, map(int, order), AHEAD_PER_THREAD * num_threads)
            while ahead.waiting:
                with ShardWriter(out / shard_name(PARTS[split], len(records[split]))) as writer:
                    records[split].append(write_shard(writer, ahead, files, settings, progress, show))
    write_whole(out / CLASSES, "".join(f"{name}\n" for name in library.class_names).encode())
    write_arrays(out / INDEX, make_index(library, records, identity))
    return progress


def write_shard(
    writer: ShardWriter,
    ahead: Ahead,
    files: Source,
    settings: PackSettings,
    progress: Progress,
    show: Callable[[Progress], None],
) -> Arrays:
    """As many samples as fit, and one at least; images that are skipped belong to the shard before them."""
    skipped: list[int] = []
    reasons: list[str] = []
    source_bytes = 0
    while ahead.waiting:
        number, made = ahead.first()
        if made.sample is None:
            reasons.append(f"{files.where(number)}: {one_line(made.reason)}")
            if settings.on_error == "raise":
                raise UserError(f"{reasons[-1]}; --on-error skip leaves such images out")
            skipped.append(number)
            progress.skipped.append(reasons[-1])
        elif writer.rows and writer.size + len(made.sample) + len(END) > settings.shard_mb * MEGABYTE:
            break
        else:
            writer.add(number, made.sample)
            progress.written_bytes += len(made.sample)
        ahead.take()
        source_bytes += made.source_bytes
        progress.images += 1
        progress.read_bytes += made.source_bytes
        show(progress)
    if not writer.rows:
        raise UserError(f"none of the {len(files):,} images can be read, the first: {reasons[0]}; mend them")
    progress.shards += 1
    return writer.finish(
        {
            "skipped": np.array(skipped, np.int64),
            "reasons": np.array(reasons, np.str_),
            "source_bytes": np.array(source_bytes),
        }
    )


def make_sample(files: Source, directories: list[str], settings: PackSettings, number: int) -> Made:
    """Read, checked, made smaller if need be, and laid out for the tar."""
    source_bytes, label = 0, int(files.labels[number])
    try:
        content = files.content(number)
        source_bytes = len(content)
        stored = prepare(content, settings.shorter_side, settings.quality)
        stem, _, suffix = files.name(number).rpartition("/")[2].rpartition(".")
    except (Unreadable, Damaged, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Made(None, reason, source_bytes)
    key = f"{directories[label]}/{number:08d}-{stem.replace('.', '_')}"
    return Made(Sample.of(key, stored.suffix or f".{suffix.lower()}", stored, label), "", source_bytes)


def directory_of(class_name: str) -> str:
    """A class's folder in the tar.  A name that is none for a folder is made one: someone may unpack the tar."""
    name = class_name.replace("/", "_")
    return name if name.strip(".") else "_" * max(1, len(name))


def whole_shards(out: Path, part: str) -> list[Arrays]:
    """The records of the shards that an earlier command finished; what else it left of this part is removed."""
    records: list[Arrays] = []
    with contextlib.suppress(*UNREADABLE):
        while True:
            path = out / shard_name(part, len(records))
            record = read_arrays(record_path(path))
            if path.stat().st_size != record["size"]:
                break
            records.append(record)
    kept = {shard_name(part, shard) for shard in range(len(records))}
    for path in out.glob(f"{part}-*.tar"):
        if path.name not in kept:
            path.unlink()
    return records


def clean_up(out: Path) -> None:
    """What only an unfinished pack needs."""
    for part in PARTS:
        for path in (*out.glob(f".{part}-*.npz"), *out.glob(f".{part}-*.tar.part")):
            path.unlink()
    for path in out.glob(f"{WRITING}*"):
        path.unlink()
    (out / UNFINISHED).unlink(missing_ok=True)


def make_index(library: Library, records: list[list[Arrays]], identity: Identity) -> Arrays:
    """See `shards`.  `number` is a sample's in the source, from which a pack without skipped images does not differ."""
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
        "class_names": np.array(library.class_names),
        "shards": np.array(names),
        "sizes": np.array([record["size"] for record in shards], np.int64),
        "rest_crc32": np.array([record["rest_crc32"] for record in shards], np.uint32),
        "number": columns["number"][order],
        **{name: columns[name][order].astype(kind) for name, kind in COLUMNS.items()},
    }
