"""Images in folders: one folder for each class, or train/ and val/ (see `splits`) with such folders in each.

Samples are numbered by class and then by path, both sorted, so a folder gives the same numbers on every machine.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.files import IMAGE_SUFFIXES, Content, EncodedDataset
from megabatch.data.sources.index import cached_index, settled_mtime
from megabatch.data.sources.labels import LAYOUT, are_splits, choose_splits, class_names_of, warn_of_names
from megabatch.errors import UserError
from megabatch.io.arrays import Arrays, Texts, fingerprint
from megabatch.io.reading import MOST_BYTES, read_file
from megabatch.text import is_plain, one_line

WHOLE = [""]  # the parts of a folder that has no splits
FLAT_IMAGENET = "ILSVRC2012_val_"
IMAGENET = "ImageNet as it is downloaded is sorted by megabatch pack --imagenet DIR OUT"


class FolderFiles:
    """Files by their paths below `folder`."""

    def __init__(self, folder: Path, names: Texts, labels: NDArray[np.int64]) -> None:
        self.folder, self.names, self.labels = folder, names, labels
        self.prefix = f"{folder}{os.sep}"  # pathlib takes longer to join two names than the system to open the file

    def __len__(self) -> int:
        return len(self.names)

    def content(self, number: int, most_bytes: int = MOST_BYTES) -> Content:
        return read_file(f"{self.prefix}{self.names[number]}", most_bytes)

    def where(self, number: int, read: bool = True) -> str:
        return one_line(str(self.folder / self.names[number]))

    def name(self, number: int) -> str:
        return self.names[number]

    def fingerprint(self) -> str:
        """Of which files there are, in which order and of which class; not of what they hold."""
        return fingerprint(self.names.content, self.names.ends, self.labels)


def read_folder(path: Path) -> EncodedDataset:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a folder of class folders ({LAYOUT})")
    if not path.is_dir():
        raise UserError(f"{path} is no folder; give a folder of class folders ({LAYOUT})")
    path = path.resolve()
    try:
        index = cached_index("folder", path, lambda: index_folder(path), is_current)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read ({error.strerror}); fix that, or remove it"
        ) from error
    parts = [
        FolderFiles(path / str(name), Texts(index[f"names_{part}"], index[f"ends_{part}"]), index[f"labels_{part}"])
        for part, name in enumerate(index["parts"])
    ]
    names = tuple(str(name) for name in index["class_names"])
    return EncodedDataset(class_names=names, train=parts[0], test=parts[1] if len(parts) > 1 else None, place=str(path))


def warn_of_classes(data: EncodedDataset) -> tuple[str, ...]:
    """Return the warnings about its class names; if a folder has one class, with the folder that was probably meant."""
    files = data.train
    if len(data.class_names) > 1 or not isinstance(files, FolderFiles):
        return warn_of_names(data.class_names, data.place)
    folder = files.folder
    # Names are sorted: a folder that holds the first and the last image holds all of them.
    first, last = (Path(files.name(number)).parent for number in (0, len(files) - 1))
    below = folder / os.path.commonpath([first, last])
    if first == last:
        remedy = f"give each class a folder, or, if {folder.name} is one of the classes, use {folder.parent}"
    elif str(folder) == data.place:
        remedy = f"the path is probably too high: use {below}"
    else:
        remedy = f"if the folders in {below} are the classes, move them up into {folder}"
    return warn_of_names(data.class_names, str(folder), remedy)


def is_current(index: Arrays) -> bool:
    """True as long as nothing was added to any of its folders, or taken away."""
    require_listed(index)
    folders = Texts(index["folders"], index["folder_ends"])
    return all(Path(folders[at]).stat().st_ctime_ns == mtime for at, mtime in enumerate(index["mtimes"]))


def require_listed(index: Arrays) -> None:
    """ValueError or KeyError where an index from the cache is none."""
    parts, names = index["parts"], class_names_of(index["class_names"], "the cache")
    if parts.dtype.kind != "U" or parts.ndim != 1 or not (parts.tolist() == WHOLE or are_splits(parts.tolist())):
        raise ValueError("it has other parts")
    Texts(index["folders"], index["folder_ends"]).require_consistent()
    for part in range(len(parts)):
        labels = index[f"labels_{part}"]
        listed = Texts(index[f"names_{part}"], index[f"ends_{part}"])
        listed.require_consistent()
        if labels.dtype != np.int64 or labels.shape != (len(listed),) or not len(listed):
            raise ValueError("labels are not one for each image")
        if labels.min() < 0 or labels.max() >= len(names):
            raise ValueError("a label has no class name")
    if index["mtimes"].dtype != np.int64 or index["mtimes"].shape != index["folder_ends"].shape:
        raise ValueError("times are not one for each folder")


def index_folder(path: Path) -> Arrays:
    walk = Walk()
    parts = choose_splits(walk.names_in(path)[0], path) or WHOLE
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
        "mtimes": np.array(walk.mtimes, np.int64),
    }
    for part, classes in enumerate(listed):
        names = Texts.of(f"{name}/{image}" for name, images in classes.items() for image in images)
        counts = [len(images) for images in classes.values()]
        index[f"names_{part}"], index[f"ends_{part}"] = names.content, names.ends
        index[f"labels_{part}"] = np.repeat(np.arange(len(classes)), counts)
    return index


class Walk:
    """Lists folders, and remembers when each was changed."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.mtimes: list[int] = []

    def names_in(self, folder: Path) -> tuple[list[str], list[str]]:
        """The names of the folders and of the files in it, without those that are hidden."""
        self.mtimes.append(settled_mtime(folder))
        self.folders.append(str(folder))
        names: tuple[list[str], list[str]] = ([], [])
        with os.scandir(folder) as entries:
            for entry in entries:
                is_dir = entry.is_dir()
                # Neither is a socket or the like; a link that leads nowhere is an image that cannot be read.
                if not entry.name.startswith(".") and (is_dir or entry.is_file() or entry.is_symlink()):
                    names[not is_dir].append(entry.name)
        return names


def list_classes(folder: Path, walk: Walk) -> dict[str, list[str]]:
    """The paths of the images of every class, sorted."""
    names, files = walk.names_in(folder)
    if not names and not files:
        raise UserError(f"{folder} is empty; expected {LAYOUT}")
    if not names:
        raise UserError(
            f"{folder} holds {len(files):,} files ({min(files)}) but no class folders; "
            + (IMAGENET if FLAT_IMAGENET in min(files) else f"put each image into the folder of its class: {LAYOUT}")
        )
    for name in names:
        if not is_plain(name):
            raise UserError(f"{folder} has a class folder {name!r}, whose name is no plain text; rename it")
    return {name: list_images(folder / name, walk) for name in sorted(names)}


def list_images(folder: Path, walk: Walk) -> list[str]:
    images, other = [], None
    below = [""]
    while below:
        prefix = below.pop()
        folders, files = walk.names_in(folder / prefix)
        below += [f"{prefix}{name}/" for name in folders]
        for name in files:
            if name[name.rfind(".") :].lower() in IMAGE_SUFFIXES:
                images.append(prefix + name)
            else:
                other = prefix + name
    if not images:
        found = f"; {other} has another suffix" if other else ""
        raise UserError(
            f"{folder} holds no image (suffixes {' '.join(IMAGE_SUFFIXES)}){found}; "
            "remove it, or put the images of this class there"
        )
    return sorted(images)


def require_same_classes(train: Path, train_classes: list[str], test: Path, test_classes: list[str]) -> None:
    if len(train_classes) == len(test_classes) == 1 and train_classes != test_classes:
        raise UserError(
            f"{train} holds only the folder {train_classes[0]!r} and {test} only {test_classes[0]!r}; both must have "
            "the same classes: if these folders hold the class folders, move those up one level"
        )
    for having, classes, lacking, others in (
        (train, train_classes, test, test_classes),
        (test, test_classes, train, train_classes),
    ):
        missing = sorted(set(classes) - set(others))
        if missing:
            count = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            raise UserError(
                f"{lacking} has no class {missing[0]!r}{count}, which {having} has; both must have the same ones"
            )
