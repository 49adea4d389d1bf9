"""Images that lie in arrays on disk: `.npz` files, and the IDX files of MNIST and its relatives."""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megabatch.data.pipeline.images import ArrayImages, DataSet
from megabatch.data.sources.labels import class_names_of, labels_of, warn_of_names
from megabatch.errors import UserError
from megabatch.io.arrays import NotArrays, read_arrays, require_expansion
from megabatch.io.reading import opened

Arrays = dict[str, NDArray[np.generic]]

MOST_CHANNELS = 16  # more is an array whose channels come first
CLASS_NAMES = "class_names"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def read_npz(path: Path) -> Arrays:
    """train_images, train_labels, test_images, test_labels and, if it is there, class_names."""
    if not path.exists():
        raise UserError(f"{path} does not exist; data.source names an .npz file, a folder of IDX files, or a known set")
    try:
        arrays = read_arrays(path, wanted=(*ARRAYS, CLASS_NAMES))
    except (OSError, NotArrays) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as .npz arrays ({reason}); make it again with numpy.savez") from error
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise UserError(f"{path} has no array {missing[0]!r}; it must hold {', '.join(ARRAYS)}")
    return arrays


def is_idx_folder(folder: Path) -> bool:
    return any(folder.glob("*-ubyte")) or any(folder.glob("*-ubyte.gz"))


def read_idx_folder(folder: Path) -> Arrays:
    """The four files of MNIST and its relatives, as they are or gzipped."""
    arrays: Arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_images"] = read_idx(folder, f"{prefix}-images-idx3-ubyte", num_dims=3)
        arrays[f"{part}_labels"] = read_idx(folder, f"{prefix}-labels-idx1-ubyte", num_dims=1)
    return arrays


def read_idx(folder: Path, name: str, num_dims: int) -> NDArray[np.uint8]:
    """IDX: two zero bytes, the type (8 = uint8), the number of dims, each dim as big-endian uint32, the bytes."""
    path = next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)
    if path is None:
        raise UserError(f"{folder / name} (or {name}.gz) does not exist; an IDX folder holds four such files")
    try:
        with opened(path) as (descriptor, stored), reading_idx(path, descriptor) as file:
            return read_idx_array(file, stored, num_dims)
    except (OSError, EOFError, zlib.error, MemoryError, NotArrays) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}); fetch it again") from error


def reading_idx(path: Path, descriptor: int) -> BinaryIO:
    file = os.fdopen(descriptor, "rb", closefd=False)
    return gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file  # type: ignore[return-value]


def read_idx_array(file: BinaryIO, stored: int, num_dims: int) -> NDArray[np.uint8]:
    """Of a file that has `stored` bytes on disk."""
    header = file.read(4 + 4 * num_dims)
    if header[:4] != bytes([0, 0, 8, num_dims]) or len(header) < 4 + 4 * num_dims:
        raise NotArrays(f"it is not an IDX file of bytes with {num_dims} dimensions")
    shape = struct.unpack_from(f">{num_dims}I", header, 4)
    size = math.prod(shape)
    require_expansion(size, stored)
    content = file.read(size + 1)
    if len(content) != size:
        held = f"more than {size:,}" if len(content) > size else f"{len(content):,}"
        raise NotArrays(f"it holds {held} bytes where its header promises {size:,}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def from_arrays(arrays: Arrays, image_size: int, path: Path) -> DataSet:
    parts = {
        part: array_images(image_size, arrays[f"{part}_images"], arrays[f"{part}_labels"], f"{path}: {part}")
        for part in ("train", "test")
    }
    num_labels = 1 + max(int(part.labels.max()) for part in parts.values())
    names = class_names_of(arrays.get(CLASS_NAMES, np.arange(num_labels)), str(path))
    if len(names) < num_labels:
        raise UserError(f"{path} has a label {num_labels - 1} but only {len(names)} class_names; name them all")
    train, test = parts["train"], parts["test"]
    if train.images.shape[1] != test.images.shape[1]:
        raise UserError(f"{path}: train_images and test_images differ in channels; they must be alike")
    return DataSet(train, test, names, train.images.shape[1], warnings=warn_of_names(names, str(path)))


def array_images(image_size: int, images: NDArray[np.generic], labels: NDArray[np.generic], where: str) -> ArrayImages:
    """Checks one part of an array source; brings it to [N, C, H, W] and to the recipe's image size."""
    channels = images.shape[3] if images.ndim == 4 else 1
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape or channels > MOST_CHANNELS:
        raise UserError(
            f"{where}_images is {images.dtype} of shape {images.shape}; expected uint8 [N, H, W] or [N, H, W, C], "
            f"C at most {MOST_CHANNELS}"
        )
    numbers = labels_of(labels, len(images), f"{where}_labels")
    pixels = torch.from_numpy(images.copy())
    pixels = pixels[:, None] if images.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    size = (image_size, image_size)
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size=size, mode="bilinear", antialias=True)
    return ArrayImages(pixels, torch.from_numpy(numbers))
