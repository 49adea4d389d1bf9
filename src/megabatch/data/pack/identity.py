"""What decides every byte of a pack: the files of its source, and the settings.

It is written into the pack, begun or whole, so that a command for the same folder resumes the same pack or is refused.
"""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from megabatch.data.pack.shards import UNFINISHED, ShardFiles
from megabatch.data.sources.files import EncodedDataset
from megabatch.data.sources.folders import FolderFiles
from megabatch.data.sources.index import INDEX, read_index
from megabatch.errors import UserError
from megabatch.io import disk
from megabatch.io.reading import read_file
from megabatch.text import one_line

Source = FolderFiles | ShardFiles

LOCK = ".pack.lock"
MOST_IDENTITY_BYTES = 1_000_000


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


def identify(dataset: EncodedDataset, settings: PackSettings) -> Identity:
    parts = [files.fingerprint() for files in parts_of(dataset)]
    text = "\n".join([*parts, *dataset.class_names])
    return Identity(
        source=one_line(Path(dataset.place).name),
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        shorter_side=settings.shorter_side,
        quality=settings.quality,
        shard_mb=settings.shard_mb,
    )


def parts_of(dataset: EncodedDataset) -> list[Source]:
    parts = [dataset.train] if dataset.test is None else [dataset.train, dataset.test]
    assert all(isinstance(files, Source) for files in parts)
    return parts  # type: ignore[return-value]


def require_place(out: Path) -> None:
    """A pack, one that was begun, or nothing."""
    ours = (LOCK, INDEX, UNFINISHED)
    names = [path.name for path in out.iterdir() if not path.name.startswith(disk.WRITING)]
    if names and not set(names) & set(ours):
        raise UserError(f"{out} is not empty and no pack ({min(names)}); give a folder that is new or empty")


def is_complete(out: Path, asked: Identity) -> bool:
    """Whether OUT holds this very pack.  Another is refused, whole or begun."""
    try:
        if (out / INDEX).exists():
            found = str(read_index(out)["identity"]).encode()
        elif (out / UNFINISHED).exists():
            found = read_file(out / UNFINISHED, MOST_IDENTITY_BYTES)
        else:
            return False
        made = msgspec.json.decode(found, type=Identity)
        require_same(out, made, asked)
    except (KeyError, UnicodeError, RecursionError, msgspec.MsgspecError) as error:
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
