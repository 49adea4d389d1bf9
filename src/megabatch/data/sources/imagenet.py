"""Reads ImageNet (ILSVRC 2012) as it is downloaded, with the same samples as in train/CLASS/ and val/CLASS/.

training       ILSVRC2012_img_train.tar, a tar with a tar per class (n01440764.tar), or the same unpacked: a folder
               train/ of such tars or of class folders
validation     ILSVRC2012_img_val.tar, or a folder val/ of ILSVRC2012_val_00000001.JPEG ... or of class folders
its classes    the devkit, as downloaded or unpacked (validation_ground_truth.txt has a class number per image, meta.mat
               the classes of the numbers); or imagenet_2012_validation_synset_labels.txt; or Kaggle's
               LOC_val_solution.csv

Nothing is unpacked: images are read from inside the tars.  Samples are numbered by class and then by name, as in
folders, so a pack of the download and a pack of the sorted folders are identical.

meta.mat is a MATLAB file of version 5: a header of 128 bytes, then elements.  An element is a type and a byte count
(uint32 each, or uint16 each if at most four bytes follow in their place), the bytes, and padding to 8.  A compressed
element contains another one.  A matrix consists of elements: flags (the first byte is its class), dims, a name, and
its values.  The values of a struct array are the length and the list of its field names, and a matrix for every field
of every struct.  Numbers are stored in the smallest type that holds them.  (MAT-File Format, MathWorks; level 5.)
scipy.io.loadmat is not used: it ended the process on 4 of 800 damaged files (scipy 1.17), and it allocates as much
memory as dims ask for.
"""

import gzip
import io
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megabatch.data.pack.shards import ShardFiles, Shards
from megabatch.data.sources.files import IMAGE_SUFFIXES, EncodedDataset
from megabatch.data.sources.folders import FolderFiles, Walk, list_classes
from megabatch.data.sources.tars import read_in_chunks
from megabatch.errors import UserError
from megabatch.io.arrays import Texts
from megabatch.io.reading import open_regular, read_file
from megabatch.io.tars import Damaged, Member, walk_members

HEADER_BYTES, LITTLE_ENDIAN = 128, b"IM"
MATRIX, COMPRESSED = 14, 15
DTYPES = {
    1: "<i1",
    2: "<u1",
    3: "<i2",
    4: "<u2",
    5: "<i4",
    6: "<u4",
    7: "<f4",
    9: "<f8",
    12: "<i8",
    13: "<u8",
    16: "<u1",  # UTF-8
    17: "<u2",  # UTF-16
}
MOST_BYTES = 64_000_000  # of a compressed element
MOST_DEPTH = 8
CELL, STRUCT, TEXT = 1, 2, 4  # matrix classes; those from 6 on are numbers

PLACES = (".", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")  # the last two are in Kaggle's archive
TRAIN = ("ILSVRC2012_img_train.tar", "train", "ILSVRC2012_img_train")
VALIDATION = ("ILSVRC2012_img_val.tar", "val", "ILSVRC2012_img_val")
DEVKIT = ("ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12.tar.gz", ".")
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
SYNSETS, SOLUTION = "imagenet_2012_validation_synset_labels.txt", "LOC_val_solution.csv"
MOST_LIST_BYTES = 256_000_000  # of the devkit or a list of classes; they have a hundredth of this
GZIP = b"\x1f\x8b"
CLASS = re.compile(r"n\d{8}")

Files = FolderFiles | ShardFiles


class Element(NamedTuple):
    kind: int
    content: bytes

    def numbers(self) -> list[Any]:
        values: list[Any] = np.frombuffer(self.content, DTYPES[self.kind]).tolist()
        return values


def read_structs(content: bytes, name: str) -> list[dict[str, Any]]:
    """Return the structs of the variable `name` as dicts.  Raise ValueError if it is missing or damaged."""
    if content[126:128] != LITTLE_ENDIAN:
        raise ValueError("it is not a .mat file of version 5")
    try:
        for element in elements(content[HEADER_BYTES:]):
            if element.kind == COMPRESSED:
                element = next(elements(decompress(element.content)))
            if element.kind == MATRIX:
                _, _, element_name, *_ = elements(element.content)
                if element_name.content.decode("latin-1") == name:
                    value = parse_matrix(element.content)
                    if isinstance(value, list) and all(isinstance(member, dict) for member in value):
                        return value
    except (struct.error, zlib.error, KeyError, StopIteration, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"it is damaged ({error!r})") from error
    raise ValueError(f"it has no struct array {name!r}")


def decompress(content: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    plain = decompressor.decompress(content, MOST_BYTES)
    if decompressor.unconsumed_tail:
        raise ValueError(f"it decompresses to more than {MOST_BYTES:,} bytes")
    return plain


def elements(content: bytes) -> Iterator[Element]:
    at = 0
    while at + 8 <= len(content):
        small_kind, small_length = struct.unpack_from("<HH", content, at)
        if small_length:
            yield Element(small_kind, content[at + 4 : at + 4 + small_length])
            at += 8
            continue
        kind, length = struct.unpack_from("<II", content, at)
        yield Element(kind, content[at + 8 : at + 8 + length])
        # Compressed elements are not padded.
        at += 8 + (length if kind == COMPRESSED else -(-length // 8) * 8)


def parse_matrix(content: bytes, depth: int = 0) -> Any:
    """Return a text, a list of numbers or a list of structs, or None for other classes."""
    if not content:
        return None
    if depth > MOST_DEPTH:
        raise ValueError(f"its structs are nested more than {MOST_DEPTH} deep")
    flags, dims, _, *values = elements(content)
    matrix_class, count = flags.content[0], math.prod(dims.numbers())
    if matrix_class == STRUCT:
        width = values[0].numbers()[0]
        names = [
            values[1].content[begin : begin + width].partition(b"\0")[0].decode("latin-1")
            for begin in range(0, len(values[1].content), width)
        ]
        members = values[2:]
        if not names or count * len(names) != len(members):
            raise ValueError(f"it is damaged: {len(members)} members for {count} structs of {len(names)} fields")
        return [
            {
                field: parse_matrix(member.content, depth + 1)
                for field, member in zip(names, members[at * len(names) : (at + 1) * len(names)], strict=True)
            }
            for at in range(count)
        ]
    if matrix_class == TEXT:
        return "".join(map(chr, values[0].numbers())) if values else ""
    return values[0].numbers() if matrix_class != CELL and values else None


class TarImage(NamedTuple):
    """An image in a tar.  Sorting orders images by class and then by name."""

    label: str
    name: str
    shard: int
    offset: int
    length: int


def read_imagenet(folder: Path) -> EncodedDataset:
    try:
        train, class_names = read_train(first_of(folder, TRAIN, "training images"))
        test = read_validation(folder, first_of(folder, VALIDATION, "validation images"), class_names)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be read ({error.strerror or error}); check its permissions"
        ) from error
    return EncodedDataset(class_names=class_names, train=train, test=test, place=str(folder))


def first_of(folder: Path, names: Sequence[str], what: str) -> Path:
    for path in candidates(folder, names):
        if path.exists():
            return path
    raise UserError(f"{folder} has no {what}; expected one of {', '.join(names)} in it")


def candidates(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    return (folder / place / name for name in names for place in PLACES)


def read_train(path: Path) -> tuple[Files, tuple[str, ...]]:
    """Return the training files and the class names."""
    tars = sorted(entry for entry in path.glob("*.tar") if CLASS.fullmatch(entry.stem)) if path.is_dir() else [path]
    if not tars:
        return read_class_folders(path)
    found = [image for shard, tar in enumerate(tars) for image in find_in_train_tar(tar, shard)]
    if not found:
        raise UserError(f"{path} has no image of a class such as n01440764; download it again")
    class_names = tuple(sorted({image.label for image in found}))
    return shard_files(tars, found, class_names), class_names


def read_class_folders(path: Path) -> tuple[FolderFiles, tuple[str, ...]]:
    classes = list_classes(path, Walk())
    names = [f"{name}/{image}" for name, images in classes.items() for image in images]
    labels = np.repeat(np.arange(len(classes)), [len(images) for images in classes.values()])
    return FolderFiles(path.resolve(), Texts.of(names), labels), tuple(classes)


def find_in_train_tar(path: Path, shard: int) -> Iterator[TarImage]:
    """Yield the images of a tar of class tars, or of the tar of a class."""
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
                    yield TarImage(label, Path(member.name).name, shard, member.offset, member.length)


@contextmanager
def reading_members(path: Path) -> Iterator[Callable[[int, int], Iterator[Member]]]:
    """Open a tar.  The result yields the members from one offset to another: of the tar itself, or of one in it."""
    with io.FileIO(path, opener=open_regular) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # only headers are read
        read = read_in_chunks(file.fileno())
        with refusing_damage(path):
            yield lambda begin, end: walk_members(read, end, begin)


@contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except Damaged as error:
        raise UserError(f"{path} is damaged at offset {error.offset} ({error.reason}); download it again") from error


def is_image(name: str) -> bool:
    return name[name.rfind(".") :].lower() in IMAGE_SUFFIXES


def shard_files(tars: Sequence[Path], found: Iterable[TarImage], class_names: Sequence[str]) -> ShardFiles:
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
            raise UserError(
                f"only one of {path} and the training images has class {differing!r}; both must have the same classes"
            )
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
        TarImage(class_of[Path(member.name).stem], Path(member.name).name, 0, member.offset, member.length)
        for member in members
    ]
    return shard_files([path], found, class_names)


def require_classes(path: Path, names: Sequence[str], class_of: dict[str, str], class_names: Sequence[str]) -> None:
    unknown = next((name for name in names if Path(name).stem not in class_of), None)
    if unknown or len(names) != len(class_of):
        which = f"{unknown} is not listed" if unknown else "some are missing"
        raise UserError(
            f"{path} has {len(names):,} images, but {len(class_of):,} are listed with a class ({which}); "
            "download both again"
        )
    without = sorted({*class_of.values()} - {*class_names})
    if without:
        raise UserError(f"{path} has images of class {without[0]}, which has no training images; add them")


def read_validation_classes(folder: Path) -> dict[str, str]:
    """Return the class of each validation image by its name without .JPEG."""
    for path in candidates(folder, (SYNSETS,)):
        if path.is_file():
            return by_number(read_text(path).split())
    for path in candidates(folder, (SOLUTION,)):
        if path.is_file():
            rows = [row.partition(",") for row in read_text(path).splitlines()[1:] if row]
            torn = next((row for row in rows if not row[2].strip()), None)
            if torn:
                raise UserError(f"{path} has a line {torn[0]!r} without a class; download it again")
            return {image: prediction.split()[0] for image, _, prediction in rows}
    for path in candidates(folder, DEVKIT):
        found = read_devkit(path)
        if found:
            return found
    raise UserError(
        f"{folder} has no list of the classes of its validation images; add the devkit "
        f"(ILSVRC2012_devkit_t12.tar.gz, or unpacked: data/{TRUTH} and data/{META}), {SYNSETS} or {SOLUTION}"
    )


def read_text(path: Path) -> str:
    return read_file(path, MOST_LIST_BYTES).decode("utf-8", "replace")


def by_number(classes: Sequence[str]) -> dict[str, str]:
    return {f"ILSVRC2012_val_{number:08d}": name for number, name in enumerate(classes, 1)}


def read_devkit(path: Path) -> dict[str, str] | None:
    """Return the class of each validation image from the devkit at `path`, or None if it is not there."""
    truth, meta = (read_devkit_file(path, name) for name in (TRUTH, META))
    if truth is None and meta is None:
        return None
    if truth is None or meta is None:
        missing = TRUTH if truth is None else META
        raise UserError(f"{path} has no data/{missing}; download the devkit again, or add {SYNSETS} next to it")
    try:
        class_of = {int(synset["ILSVRC2012_ID"][0]): str(synset["WNID"]) for synset in read_structs(meta, "synsets")}
        return by_number([class_of[int(number)] for number in truth.split()])
    except (LookupError, ValueError, TypeError, OverflowError) as error:  # a missing field, or not a number
        raise UserError(f"{path}: data/{META} cannot be read ({error}); add {SYNSETS} next to it") from error


def read_devkit_file(path: Path, name: str) -> bytes | None:
    if path.is_dir():
        found = path / "data" / name
        return read_file(found, MOST_LIST_BYTES) if found.is_file() else None
    if not path.is_file():
        return None
    content = unzipped(path)
    with refusing_damage(path):
        for member in walk_members(lambda offset, length: content[offset : offset + length], len(content)):
            if Path(member.name).name == name:
                return content[member.offset : member.offset + member.length]
    return None


def unzipped(path: Path) -> bytes:
    """Return the devkit's tar, decompressed."""
    content = read_file(path, MOST_LIST_BYTES)
    if content[: len(GZIP)] == GZIP:
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_LIST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} cannot be decompressed ({error}); download it again") from error
    if len(content) > MOST_LIST_BYTES:
        raise UserError(f"{path} has more than {MOST_LIST_BYTES:,} bytes, so it is not a devkit; download it again")
    return content
