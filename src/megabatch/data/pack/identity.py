"""The identity of a pack: a fingerprint of its source, and the settings.  Together they determine every byte.

It is stored in finished and unfinished packs, so that a command for the same folder resumes the same pack or is
refused.
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
from megabatch.data.sources.table import TableFiles
from megabatch.errors import UserError
from megabatch.io import disk
from megabatch.io.reading import read_file
from megabatch.text import one_line

Source = FolderFiles | TableFiles | ShardFiles

LOCK = ".pack.lock"
MOST_IDENTITY_BYTES = 1_000_000


class PackSettings(Struct, frozen=True, kw_only=True):
    shorter_side: int | None = None  # larger images are shrunk to it; None stores the original bytes
    quality: int = 90  # of images that are shrunk
    shard_mb: int = 256
    on_error: Literal["raise", "skip"] = "raise"


class Identity(Struct, frozen=True, kw_only=True):
    source: str  # its name, for messages
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
    """Refuse a folder that is neither empty nor a finished or unfinished pack."""
    names = [path.name for path in out.iterdir() if not path.name.startswith(disk.WRITING)]
    if names and not {*names} & {LOCK, INDEX, UNFINISHED}:
        raise UserError(f"{out} is neither empty nor a pack: it contains {min(names)}; give a new or empty folder")


def is_complete(out: Path, wanted: Identity) -> bool:
    """Return whether `out` is this pack and finished.  Refuse a different pack, finished or not."""
    try:
        if (out / INDEX).exists():
            found = str(read_index(out)["identity"]).encode()
        elif (out / UNFINISHED).exists():
            found = read_file(out / UNFINISHED, MOST_IDENTITY_BYTES)
        else:
            return False
        require_same(out, msgspec.json.decode(found, type=Identity), wanted)
    except (KeyError, UnicodeError, RecursionError, msgspec.MsgspecError) as error:
        raise UserError(
            f"{out} has no valid record of its pack settings ({error}); delete it, or give another folder"
        ) from error
    return (out / INDEX).exists()


def require_same(out: Path, existing: Identity, wanted: Identity) -> None:
    for key in ("shorter_side", "quality", "shard_mb"):
        before, now = getattr(existing, key), getattr(wanted, key)
        if before != now:
            option = "--" + key.replace("_", "-")
            raise UserError(
                f"{out} was packed with {option} {before or 'not given'}, now it is {now or 'not given'}; "
                f"give the same value or another folder, or delete {out}"
            )
    if existing.fingerprint != wanted.fingerprint:
        raise UserError(
            f"{out} was packed from {existing.source!r} with other files than {wanted.source!r} has now; "
            f"give another folder, or delete {out}"
        )
