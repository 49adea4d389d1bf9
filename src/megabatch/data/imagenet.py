"""ImageNet (ILSVRC 2012) as it is downloaded, read as if it were sorted into train/CLASS/ and val/CLASS/.

training     ILSVRC2012_img_train.tar, a tar of a tar for each class (n01440764.tar), or the same unpacked: a folder
             train/ of such tars, or of class folders
validation   ILSVRC2012_img_val.tar, or a folder val/ of ILSVRC2012_val_00000001.JPEG ..., or of class folders
their classes  the devkit (validation_ground_truth.txt has their numbers, meta.mat what classes these are), as it is
             downloaded or unpacked; or imagenet_2012_validation_synset_labels.txt, or LOC_val_solution.csv of Kaggle

Nothing is unpacked: images are read where they lie in the tars.  Samples are numbered by class and then by name, as in
folders, so a pack of one is a pack of the other, byte by byte.
"""

import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megabatch.data.files import IMAGE_SUFFIXES, EncodedDataset
from megabatch.data.folders import FolderFiles, Walk, list_classes
from megabatch.data.image_files import read_file
from megabatch.data.matlab import read_structs
from megabatch.data.npz import Texts
from megabatch.data.shard_files import ShardFiles, Shards
from megabatch.data.tar_scan import read_in_chunks
from megabatch.data.tars import Damaged, Member, walk_members
from megabatch.errors import UserError
from megabatch.regular_files import open_regular

PLACES = (".", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")  # Kaggle's archive has the latter
TRAIN = ("ILSVRC2012_img_train.tar", "train", "ILSVRC2012_img_train")
VALIDATION = ("ILSVRC2012_img_val.tar", "val", "ILSVRC2012_img_val")
DEVKIT = ("ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12.tar.gz", ".")
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
SYNSETS, SOLUTION = "imagenet_2012_validation_synset_labels.txt", "LOC_val_solution.csv"
MOST_LIST_BYTES = 256_000_000  # of the devkit or a list of classes, which have a hundredth of it
GZIP = b"\x1f\x8b"
CLASS = re.compile(r"n\d{8}")

Files = FolderFiles | ShardFiles


class Found(NamedTuple):
    """An image in a tar."""

    label: str  # its class
    name: str
    shard: int
    offset: int
    length: int


def read_imagenet(folder: Path) -> EncodedDataset:
    try:
        train, class_names = read_train(first_of(folder, TRAIN, "training images"))
        test = read_validation(folder, first_of(folder, VALIDATION, "validation images"), class_names)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read ({error.strerror or error}); fix that") from error
    return EncodedDataset(class_names=class_names, train=train, test=test, place=str(folder))


def first_of(folder: Path, names: Sequence[str], what: str) -> Path:
    for path in candidates(folder, names):
        if path.exists():
            return path
    raise UserError(f"{folder} has no {what}; expected one of {', '.join(names)} there")


def candidates(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    return (folder / place / name for name in names for place in PLACES)


def read_train(path: Path) -> tuple[Files, tuple[str, ...]]:
    """And the names of its classes."""
    tars = sorted(entry for entry in path.glob("*.tar") if CLASS.fullmatch(entry.stem)) if path.is_dir() else [path]
    if not tars:
        return read_class_folders(path)
    found = [image for shard, tar in enumerate(tars) for image in find_in_train_tar(tar, shard)]
    if not found:
        raise UserError(f"{path} holds no image of a class such as n01440764; fetch it again")
    class_names = tuple(sorted({image.label for image in found}))
    return shard_files(tars, found, class_names), class_names


def read_class_folders(path: Path) -> tuple[FolderFiles, tuple[str, ...]]:
    classes = list_classes(path, Walk())
    names = [f"{name}/{image}" for name, images in classes.items() for image in images]
    labels = np.repeat(np.arange(len(classes)), [len(images) for images in classes.values()])
    return FolderFiles(path.resolve(), Texts.of(names), labels), tuple(classes)


def find_in_train_tar(path: Path, shard: int) -> Iterator[Found]:
    """Of a tar of class tars, or of one class."""
    with reading_members(path) as members:
        if CLASS.fullmatch(path.stem):
            parts = [(path.stem, 0, path.stat().st_size)]
        else:
            parts = [
                (Path(member.name).stem, member.offset, member.offset + member.length)
                for member in members(0, path.stat().st_size)
                if CLASS.fullmatch(Path(member.name).stem) and member.name.endswith(".tar")
            ]
        for label, begin, end in parts:
            for member in members(begin, end):
                if is_image(member.name):
                    yield Found(label, Path(member.name).name, shard, member.offset, member.length)


@contextmanager
def reading_members(path: Path) -> Iterator[Callable[[int, int], Iterator[Member]]]:
    """Of the tar that lies from one offset to another in the file at `path`, which is one itself."""
    with io.FileIO(path, opener=open_regular) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # it jumps from header to header
        read = read_in_chunks(file.fileno())
        try:
            yield lambda begin, end: walk_members(read, end, begin)
        except Damaged as error:
            raise UserError(f"{path} is damaged at offset {error.offset} ({error.reason}); fetch it again") from error


def is_image(name: str) -> bool:
    return name[name.rfind(".") :].lower() in IMAGE_SUFFIXES


def shard_files(tars: Sequence[Path], found: Iterable[Found], class_names: Sequence[str]) -> ShardFiles:
    number_of = {name: number for number, name in enumerate(class_names)}
    images = sorted(found)
    return ShardFiles(
        Shards([tar.resolve() for tar in tars], np.array([tar.stat().st_size for tar in tars])),
        np.array([image.shard for image in images], np.int32),
        np.array([image.offset for image in images], np.int64),
        np.array([image.length for image in images], np.int64),
        np.array([number_of[image.label] for image in images], np.int64),
    )


def read_validation(folder: Path, path: Path, class_names: tuple[str, ...]) -> Files:
    if path.is_dir() and any(entry.is_dir() for entry in os.scandir(path)):
        files, names = read_class_folders(path)
        if names != class_names:
            differing = sorted({*names} ^ {*class_names})[0]
            raise UserError(f"{path} and the training images differ in class {differing!r}; both must have the same")
        return files
    class_of = read_validation_classes(folder)
    if path.is_dir():
        names_found = [entry.name for entry in os.scandir(path) if is_image(entry.name)]
        require_classes(path, names_found, class_of, class_names)
        chosen = sorted((class_of[Path(name).stem], name) for name in names_found)
        labels = np.array([class_names.index(label) for label, _ in chosen], np.int64)
        return FolderFiles(path.resolve(), Texts.of(name for _, name in chosen), labels)
    with reading_members(path) as walk:
        members = [member for member in walk(0, path.stat().st_size) if is_image(member.name)]
    require_classes(path, [member.name for member in members], class_of, class_names)
    found = [
        Found(class_of[Path(member.name).stem], Path(member.name).name, 0, member.offset, member.length)
        for member in members
    ]
    return shard_files([path], found, class_names)


def require_classes(path: Path, names: Sequence[str], class_of: dict[str, str], class_names: Sequence[str]) -> None:
    unknown = next((name for name in names if Path(name).stem not in class_of), None)
    if unknown or len(names) != len(class_of):
        which = f"{unknown} among them is not listed" if unknown else "some are missing"
        raise UserError(
            f"{path} holds {len(names):,} images, and classes are listed of {len(class_of):,}: {which}; fetch both"
        )
    without = sorted({*class_of.values()} - {*class_names})
    if without:
        raise UserError(f"{path} has images of class {without[0]}, of which there are no training images; add them")


def read_validation_classes(folder: Path) -> dict[str, str]:
    """The class of each validation image, by its name without .JPEG."""
    for path in candidates(folder, (SYNSETS,)):
        if path.is_file():
            return by_number(read_text(path).split())
    for path in candidates(folder, (SOLUTION,)):
        if path.is_file():
            rows = [row.partition(",") for row in read_text(path).splitlines()[1:] if row]
            torn = next((row for row in rows if not row[2].strip()), None)
            if torn:
                raise UserError(f"{path} has a line {torn[0]!r} without a class; fetch it again")
            return {image: prediction.split()[0] for image, _, prediction in rows}
    for path in candidates(folder, DEVKIT):
        found = read_devkit(path)
        if found:
            return found
    raise UserError(
        f"{folder} does not say which classes its validation images are of; put the devkit "
        f"(ILSVRC2012_devkit_t12.tar.gz, or unpacked: data/{TRUTH} and data/{META}), {SYNSETS} or {SOLUTION} there"
    )


def read_text(path: Path) -> str:
    return read_file(path, MOST_LIST_BYTES).decode("utf-8", "replace")


def by_number(classes: Sequence[str]) -> dict[str, str]:
    return {f"ILSVRC2012_val_{number:08d}": name for number, name in enumerate(classes, 1)}


def read_devkit(path: Path) -> dict[str, str] | None:
    """None where there is none."""
    truth, meta = (read_devkit_file(path, name) for name in (TRUTH, META))
    if truth is None and meta is None:
        return None
    if truth is None or meta is None:
        missing = TRUTH if truth is None else META
        raise UserError(f"{path} has no data/{missing}; fetch the devkit again, or put {SYNSETS} beside it")
    try:
        class_of = {int(synset["ILSVRC2012_ID"][0]): str(synset["WNID"]) for synset in read_structs(meta, "synsets")}
        return by_number([class_of[int(number)] for number in truth.split()])
    except (LookupError, ValueError, TypeError, OverflowError) as error:  # of what is not there, or no number
        raise UserError(f"{path}: data/{META} cannot be read ({error}); put {SYNSETS} beside it") from error


def read_devkit_file(path: Path, name: str) -> bytes | None:
    if path.is_dir():
        found = path / "data" / name
        return read_file(found, MOST_LIST_BYTES) if found.is_file() else None
    if not path.is_file():
        return None
    content = unzipped(path)
    try:
        for member in walk_members(lambda offset, length: content[offset : offset + length], len(content)):
            if Path(member.name).name == name:
                return content[member.offset : member.offset + member.length]
    except Damaged as error:
        raise UserError(f"{path} is damaged at offset {error.offset} ({error.reason}); fetch it again") from error
    return None


def unzipped(path: Path) -> bytes:
    """The devkit's tar."""
    content = read_file(path, MOST_LIST_BYTES)
    if content[: len(GZIP)] == GZIP:
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_LIST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} cannot be unzipped ({error}); fetch it again") from error
    if len(content) > MOST_LIST_BYTES:
        raise UserError(f"{path} holds more than {MOST_LIST_BYTES:,} bytes, which is no devkit; fetch it again")
    return content
