"""Images in tars: shards of `megabatch pack` with their index, or WebDataset's shards without one, scanned once."""

from pathlib import Path

from megabatch.data.files import EncodedDataset
from megabatch.data.index_cache import cached_index
from megabatch.data.npz import Arrays
from megabatch.data.shard_files import ShardFiles, Shards
from megabatch.data.shard_index import INDEX, TEST, TRAIN, read_index
from megabatch.data.tar_labels import CLASSES, name_classes
from megabatch.data.tar_scan import is_current, is_tar, list_tars, scan
from megabatch.errors import UserError

UNFINISHED = ".pack.json"  # in a pack that is being written


def holds_shards(path: Path) -> bool:
    """Whether `read_shards` is for it: a tar, a pack, or a folder of tars alone.

    Tars beside folders are taken for the archives from which these were unpacked.
    """
    if not path.is_dir():
        return path.is_file() and is_tar(path)
    entries = [entry for entry in path.iterdir() if entry.name in (INDEX, UNFINISHED) or not entry.name.startswith(".")]
    if any(entry.name in (INDEX, UNFINISHED) for entry in entries):
        return True
    return any(is_tar(entry) for entry in entries) and not any(entry.is_dir() for entry in entries)


def read_shards(path: Path) -> EncodedDataset:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a .tar file, or a folder of them")
    try:
        if (path / INDEX).exists():
            return to_dataset(path, read_index(path))
        if (path / UNFINISHED).exists():
            raise UserError(f"{path} is a pack that was not finished; finish it with the same megabatch pack command")
        shards = list_tars(path)
        index = cached_index("tars", path, lambda: scan(shards, path), lambda index: is_current(index, shards))
        return to_dataset(path, index)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{error.filename or path} cannot be read ({reason}); fix that, or give another") from error


def to_dataset(path: Path, index: Arrays) -> EncodedDataset:
    folder = path if path.is_dir() else path.parent
    shards = Shards([folder / str(name) for name in index["shards"]], index["sizes"])

    def files(split: int) -> ShardFiles:
        chosen = index["split"] == split
        return ShardFiles(shards, *(index[name][chosen] for name in ("shard", "offset", "length", "label")))

    test = files(TEST)
    names = name_classes(folder / CLASSES, tuple(str(name) for name in index["class_names"]))
    return EncodedDataset(class_names=names, train=files(TRAIN), test=test if len(test) else None, place=str(path))
