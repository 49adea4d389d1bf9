"""Images that lie in arrays on disk: `.npz` files, and the IDX files of MNIST and its relatives."""

import gzip
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megabatch.data.images import ArrayImages, DataSet
from megabatch.data.shapes import MOST_CLASSES
from megabatch.errors import UserError

Arrays = dict[str, NDArray[np.generic]]

MOST_CHANNELS = 16  # more is an array whose channels come first
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def read_npz(path: Path) -> Arrays:
    """train_images, train_labels, test_images, test_labels and, if it is there, class_names."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; data.source names an .npz file, a folder of IDX files, or a known set")
    try:
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not an .npz archive; make it again with numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in ARRAYS if name not in archive]
            if missing:
                raise UserError(f"{path} has no array {missing[0]!r}; it must hold {', '.join(ARRAYS)}")
            return {name: archive[name] for name in (*ARRAYS, "class_names") if name in archive}
    except UserError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read as .npz arrays ({error}); make it again with numpy.savez") from error


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
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from error
    header = 4 + 4 * num_dims
    if content[:4] != bytes([0, 0, 8, num_dims]) or len(content) < header:
        raise UserError(f"{path} is not an IDX file of bytes with {num_dims} dimensions; fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", num_dims, offset=4))
    pixels = np.frombuffer(content, np.uint8, offset=header)
    if pixels.size != np.prod(shape):
        raise UserError(f"{path} holds {pixels.size} bytes where its header promises {np.prod(shape)}; fetch it again")
    return pixels.reshape(shape)


def from_arrays(arrays: Arrays, image_size: int, path: Path) -> DataSet:
    parts = {
        part: array_images(image_size, arrays[f"{part}_images"], arrays[f"{part}_labels"], f"{path}: {part}")
        for part in ("train", "test")
    }
    num_labels = 1 + max(int(part.labels.max()) for part in parts.values())
    if num_labels > MOST_CLASSES:
        raise UserError(f"{path} has a label {num_labels - 1}; labels number the classes from 0 to {MOST_CLASSES - 1}")
    names = np.atleast_1d(arrays.get("class_names", np.arange(num_labels)))
    if len(names) < num_labels:
        raise UserError(f"{path} has a label {num_labels - 1} but only {len(names)} class_names; name them all")
    train, test = parts["train"], parts["test"]
    if train.images.shape[1] != test.images.shape[1]:
        raise UserError(f"{path}: train_images and test_images differ in channels; they must be alike")
    return DataSet(train, test, tuple(str(name) for name in names), train.images.shape[1])


def array_images(image_size: int, images: NDArray[np.generic], labels: NDArray[np.generic], where: str) -> ArrayImages:
    """Checks one part of an array source; brings it to [N, C, H, W] and to the recipe's image size."""
    channels = images.shape[3] if images.ndim == 4 else 1
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape or channels > MOST_CHANNELS:
        raise UserError(
            f"{where}_images is {images.dtype} of shape {images.shape}; expected uint8 [N, H, W] or [N, H, W, C], "
            f"C at most {MOST_CHANNELS}"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0:
        raise UserError(
            f"{where}_labels is {labels.dtype} of shape {labels.shape} for {len(images)} images; "
            "expected one integer from 0 for each"
        )
    pixels = torch.from_numpy(images.copy())
    pixels = pixels[:, None] if images.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    size = (image_size, image_size)
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size=size, mode="bilinear", antialias=True)
    return ArrayImages(pixels, torch.from_numpy(labels.astype(np.int64)))
