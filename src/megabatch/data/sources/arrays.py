"""Reads images stored as arrays: `.npz` files, and the IDX files of MNIST and similar sets."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from megabatch.data.pipeline.images import ArrayImages, DataSet, resize_all
from megabatch.data.sources.labels import parse_class_names, parse_labels, warn_of_names
from megabatch.errors import UserError
from megabatch.io.arrays import NotArrays, read_arrays, require_expansion
from megabatch.io.reading import reading

Arrays = dict[str, NDArray[np.generic]]

MOST_CHANNELS = 16  # an array with more probably has the channels first
CLASS_NAMES = "class_names"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def read_npz(path: Path) -> Arrays:
    """Read the four arrays of ARRAYS and, if present, class_names."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give an .npz file, a folder of IDX files, or the name of a known set")
    try:
        arrays = read_arrays(path, wanted=(*ARRAYS, CLASS_NAMES))
    except (OSError, NotArrays) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as .npz arrays ({reason}); write it with numpy.savez") from error
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise UserError(f"{path} has no array {missing[0]!r}; it must contain {', '.join(ARRAYS)}")
    return arrays


def is_idx_folder(folder: Path) -> bool:
    return any(folder.glob("*-ubyte")) or any(folder.glob("*-ubyte.gz"))


def read_idx_folder(folder: Path) -> Arrays:
    """Read the four files of MNIST and similar sets, plain or gzipped."""
    arrays: Arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_images"] = read_idx(folder, f"{prefix}-images-idx3-ubyte", num_dims=3)
        arrays[f"{part}_labels"] = read_idx(folder, f"{prefix}-labels-idx1-ubyte", num_dims=1)
    return arrays


def read_idx(folder: Path, name: str, num_dims: int) -> NDArray[np.uint8]:
    """Read a file of two zero bytes, the type (8 = uint8), the number of dims, big-endian uint32 dims, and values."""
    path = next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)
    if path is None:
        raise UserError(f"{folder / name} (or {name}.gz) does not exist; an IDX folder must have four such files")
    try:
        with reading(path) as file:
            plain = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            return read_idx_array(plain, os.fstat(file.fileno()).st_size, num_dims)
    except (OSError, EOFError, zlib.error, MemoryError, NotArrays) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}); download it again") from error


def read_idx_array(file: BinaryIO | gzip.GzipFile, stored: int, num_dims: int) -> NDArray[np.uint8]:
    """Read an array from a file that has `stored` bytes on disk."""
    header = file.read(4 + 4 * num_dims)
    if header[:4] != bytes([0, 0, 8, num_dims]) or len(header) < 4 + 4 * num_dims:
        raise NotArrays(f"it is not an IDX file of bytes with {num_dims} dimensions")
    shape = struct.unpack_from(f">{num_dims}I", header, 4)
    size = math.prod(shape)
    require_expansion(size, stored)
    content = file.read(size + 1)
    if len(content) != size:
        held = f"more than {size:,}" if len(content) > size else f"{len(content):,}"
        raise NotArrays(f"it has {held} bytes of values, but its header states {size:,}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def from_arrays(arrays: Arrays, side: int, path: Path) -> DataSet:
    """Return the images, resized to `side`."""
    parts = {
        part: array_images(side, arrays[f"{part}_images"], arrays[f"{part}_labels"], f"{path}: {part}")
        for part in ("train", "test")
    }
    num_labels = 1 + max(int(part.labels.max()) for part in parts.values())
    names = parse_class_names(arrays.get(CLASS_NAMES, np.arange(num_labels)), str(path))
    if len(names) < num_labels:
        raise UserError(f"{path} has a label {num_labels - 1} but only {len(names)} class_names; name them all")
    train, test = parts["train"], parts["test"]
    if train.images.shape[1] != test.images.shape[1]:
        raise UserError(f"{path}: train_images and test_images must have the same number of channels")
    return DataSet(train, test, names, train.images.shape[1], warnings=warn_of_names(names, str(path)))


def array_images(side: int, images: NDArray[np.generic], labels: NDArray[np.generic], where: str) -> ArrayImages:
    """Check one part of an array source, and convert it to [N, C, side, side]."""
    channels = images.shape[3] if images.ndim == 4 else 1
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape or channels > MOST_CHANNELS:
        raise UserError(
            f"{where}_images is {images.dtype} of shape {images.shape}; expected uint8 [N, H, W] or [N, H, W, C] with "
            f"C at most {MOST_CHANNELS}"
        )
    numbers = parse_labels(labels, len(images), f"{where}_labels")
    pixels = torch.from_numpy(images.copy())
    pixels = pixels[:, None] if images.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return ArrayImages(resize_all(pixels, (side, side)), torch.from_numpy(numbers))
