"""Images in folders: one folder per class, or train/ and val/ (see `labels`) with one folder per class in each.

Samples are numbered by class and then by path, both sorted, so the numbers are the same on every machine.
"""

import os
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.files import IMAGE_SUFFIXES, Content, EncodedDataset
from megabatch.data.sources.index import cached_index, count_ignored, ignored_in, stable_ctime_ns
from megabatch.data.sources.labels import (
    LAYOUT,
    are_splits,
    choose_splits,
    parse_class_names,
    warn_of_lists,
    warn_of_names,
)
from megabatch.errors import UserError
from megabatch.io.arrays import Arrays, Texts, fingerprint
from megabatch.io.numbers import plural
from megabatch.io.reading import MOST_BYTES, read_file
from megabatch.text import is_plain, listed, one_line

WITHOUT_SPLITS = [""]
MOST_SUFFIXES = 5  # named in a warning
FLAT_IMAGENET = "ILSVRC2012_val_"
IMAGENET = "to sort a download of ImageNet into classes, run megabatch pack --imagenet DIR OUT"


class FolderFiles:
    """Files by their paths below `folder`."""

    def __init__(self, folder: Path, names: Texts, labels: NDArray[np.int64]) -> None:
        self.folder, self.names, self.labels = folder, names, labels
        self.prefix = f"{folder}{os.sep}"  # joining two names with pathlib takes longer than opening the file

    def __len__(self) -> int:
        return len(self.names)

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        return read_file(f"{self.prefix}{self.names[number]}", most_bytes)

    def where(self, number: int, read: bool = True) -> str:
        return one_line(str(self.folder / self.names[number]))

    def name(self, number: int) -> str:
        return self.names[number]

    def fingerprint(self) -> str:
        return fingerprint(self.names.content, self.names.ends, self.labels)


def read_folder(path: Path) -> EncodedDataset:
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {state}; give a folder of class folders ({LAYOUT})")
    path = path.resolve()
    try:
        index = cached_index("folder", path, lambda: index_folder(path), is_current)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read ({error.strerror}); check its permissions, or remove it"
        ) from error
    parts = [
        FolderFiles(path / str(name), Texts(index[f"names_{part}"], index[f"ends_{part}"]), index[f"labels_{part}"])
        for part, name in enumerate(index["parts"])
    ]
    names = tuple(str(name) for name in index["class_names"])
    return EncodedDataset(
        class_names=names,
        train=parts[0],
        test=parts[1] if len(parts) > 1 else None,
        place=str(path),
        ignored=ignored_in(index),
    )


def warn_of_classes(data: EncodedDataset) -> tuple[str, ...]:
    """Return warnings about the class names.  For a folder with one class, name the folder that was probably meant."""
    files = data.train
    if len(data.class_names) > 1 or not isinstance(files, FolderFiles):
        lists = warn_of_lists(data.class_names, data.place) if data.label_sets is None else ()
        return warn_of_names(data.class_names, data.place) + lists
    folder = files.folder
    # Names are sorted, so a folder that contains the first and the last image contains all of them.
    first, last = (Path(files.name(number)).parent for number in (0, len(files) - 1))
    below = folder / os.path.commonpath([first, last])
    if first == last:
        remedy = f"give each class a folder, or, if {folder.name} is one of the classes, use {folder.parent}"
    elif str(folder) == data.place:
        remedy = f"the path is probably too high: use {below}"
    else:
        remedy = f"if the folders in {below} are the classes, move them up into {folder}"
    return warn_of_names(data.class_names, str(folder), remedy)


def warn_of_ignored(data: EncodedDataset) -> tuple[str, ...]:
    """Return a warning with the number of files in class folders that are not read, by suffix."""
    total = sum(count for _, count in data.ignored)
    if not total:
        return ()
    named = [f"{count:,} {suffix or 'without a suffix'}" for suffix, count in data.ignored]
    is_heic = any(suffix in (".heic", ".heif") for suffix, _ in data.ignored)
    remedy = "; convert .heic to JPEG to use them" if is_heic else ""
    files = plural(total, "file that is", "files that are")
    return (f"{data.place} has {files} not read as images: {listed(named, MOST_SUFFIXES)}{remedy}",)


def is_current(index: Arrays) -> bool:
    """Return whether no file was added to or removed from the indexed folders."""
    validate_index(index)
    folders = Texts(index["folders"], index["folder_ends"])
    return all(Path(folders[at]).stat().st_ctime_ns == ctime for at, ctime in enumerate(index["ctimes"]))


def validate_index(index: Arrays) -> None:
    """Raise ValueError or KeyError if an index from the cache is damaged."""
    parts, names = index["parts"], parse_class_names(index["class_names"], "the cache")
    is_row = parts.dtype.kind == "U" and parts.ndim == 1
    if not is_row or not (parts.tolist() == WITHOUT_SPLITS or are_splits(parts.tolist())):
        raise ValueError("it has unknown parts")
    Texts(index["folders"], index["folder_ends"]).require_consistent()
    for part in range(len(parts)):
        labels = index[f"labels_{part}"]
        listed = Texts(index[f"names_{part}"], index[f"ends_{part}"])
        listed.require_consistent()
        if labels.dtype != np.int64 or labels.shape != (len(listed),) or not len(listed):
            raise ValueError("the number of labels differs from that of images")
        if labels.min() < 0 or labels.max() >= len(names):
            raise ValueError("a label has no class name")
    ignored_in(index)
    if index["ctimes"].dtype != np.int64 or index["ctimes"].shape != index["folder_ends"].shape:
        raise ValueError("the number of times differs from that of folders")


def index_folder(path: Path) -> Arrays:
    walk = Walk()
    parts = choose_splits(walk.names_in(path)[0], path) or WITHOUT_SPLITS
    listed = [list_classes(path / part, walk) for part in parts]
    class_names = list(listed[0])
    if len(parts) > 1:
        require_same_classes(path / parts[0], class_names, path / parts[1], list(listed[1]))
    folders = Texts.of(walk.folders)
    index: Arrays = {
        "parts": np.array(parts),
        "class_names": np.array(class_names),
        "folders": folders.content,
        "folder_ends": folders.ends,
        "ctimes": np.array(walk.ctimes_ns, np.int64),
        **count_ignored(walk.ignored),
    }
    for part, classes in enumerate(listed):
        names = Texts.of(f"{name}/{image}" for name, images in classes.items() for image in images)
        counts = [len(images) for images in classes.values()]
        index[f"names_{part}"], index[f"ends_{part}"] = names.content, names.ends
        index[f"labels_{part}"] = np.repeat(np.arange(len(classes)), counts)
    return index


class Walk:
    """Lists folders and records when each was last changed."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.ctimes_ns: list[int] = []
        self.ignored = Counter[str]()  # files of the classes by suffix, which are not images

    def names_in(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return the names of the folders and of the files in a folder, without hidden ones."""
        self.ctimes_ns.append(stable_ctime_ns(folder))
        self.folders.append(str(folder))
        names: tuple[list[str], list[str]] = ([], [])
        with os.scandir(folder) as entries:
            for entry in entries:
                is_dir = entry.is_dir()
                # Sockets and the like are ignored.  A broken link counts as an image that cannot be read.
                if not entry.name.startswith(".") and (is_dir or entry.is_file() or entry.is_symlink()):
                    names[not is_dir].append(entry.name)
        return names


def list_classes(folder: Path, walk: Walk) -> dict[str, list[str]]:
    """Return the sorted paths of the images of every class."""
    names, files = walk.names_in(folder)
    if not names and not files:
        raise UserError(f"{folder} is empty; expected {LAYOUT}")
    if not names:
        raise UserError(
            f"{folder} has {len(files):,} files ({min(files)}) but no class folders; "
            + (IMAGENET if FLAT_IMAGENET in min(files) else f"put each image into the folder of its class: {LAYOUT}")
        )
    for name in names:
        if not is_plain(name):
            raise UserError(f"{folder} has a class folder {name!r} with control characters in its name; rename it")
    return {name: list_images(folder / name, walk) for name in sorted(names)}


def list_images(folder: Path, walk: Walk) -> list[str]:
    images, other = [], None
    below = [""]
    while below:
        prefix = below.pop()
        folders, files = walk.names_in(folder / prefix)
        below += [f"{prefix}{name}/" for name in folders]
        for name in files:
            suffix = name[name.rfind(".") :].lower()
            if suffix in IMAGE_SUFFIXES:
                images.append(prefix + name)
            else:
                other = prefix + name
                walk.ignored[suffix if "." in name else ""] += 1
    if not images:
        found = f"; {other} has another suffix" if other else ""
        raise UserError(
            f"{folder} has no image (suffixes {' '.join(IMAGE_SUFFIXES)}){found}; "
            "remove it, or add images of this class"
        )
    return sorted(images)


def require_same_classes(train: Path, train_classes: list[str], test: Path, test_classes: list[str]) -> None:
    if len(train_classes) == len(test_classes) == 1 and train_classes != test_classes:
        raise UserError(
            f"{train} has only the folder {train_classes[0]!r} and {test} only {test_classes[0]!r}, but both must have "
            "the same classes; if the class folders are inside these folders, move them up one level"
        )
    for having, classes, lacking, others in (
        (train, train_classes, test, test_classes),
        (test, test_classes, train, train_classes),
    ):
        missing = sorted(set(classes) - set(others))
        if missing:
            named = listed([*map(repr, missing)], 1)
            raise UserError(f"{lacking} has no class {named}, but {having} has; both must have the same classes")
