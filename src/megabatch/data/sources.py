"""Where images come from: the embedded set, IDX files, `.npz` arrays, or thin air.

`load_data_set` turns the recipe's `data.source` into a training and a test `ImageSet`, whatever it was on disk.
"""

import gzip
import zipfile
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from megabatch.data.order import Samples
from megabatch.data.philox import SYNTHETIC, draw, draw_below
from megabatch.data.shapes import FASHION_MNIST_10K, FULL_FASHION_MNIST, IMAGENET, DataShape
from megabatch.errors import UserError, nearest
from megabatch.planning.batch import Count

Arrays = dict[str, NDArray[np.generic]]

FROM_PYTHON = "python:"  # begins the source of a run whose images were handed to `megabatch.fit`
EMBEDDED = "fashion_mnist_10k.npz"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
FASHION_CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")
MOST_CHANNELS = 16  # more is an array whose channels come first
MOST_CLASSES = 1_000_000  # more is not a label but some other number
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


class SyntheticSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images that cost nothing to read and can still be learnt, for trials and benchmarks."""

    train: Count = 10_000
    test: Count = 2_000
    classes: Annotated[int, Meta(ge=2)] = 10
    channels: Count = 3


class DataSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str  # a name of NAMED_SOURCES, a folder of IDX files, or an .npz file
    image_size: Annotated[int, Meta(ge=8)]
    crop_padding: Annotated[int, Meta(ge=0)] = 0
    flip: bool = False
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)


class ImageSet(Protocol):
    """Images and labels by sample number.  `read` may be called from any thread, in any order."""

    labels: torch.Tensor  # int64 [N]

    def __len__(self) -> int: ...

    def read(self, samples: Samples) -> torch.Tensor:
        """uint8 [B, C, H, W], a copy that the caller may change."""
        ...


class DataSet(Struct, frozen=True):
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    num_channels: int

    @property
    def shape(self) -> DataShape:
        return DataShape(
            num_train=len(self.train),
            num_test=len(self.test),
            num_classes=len(self.class_names),
            num_channels=self.num_channels,
        )


class ArrayImages:
    """Images that lie in memory."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, samples: Samples) -> torch.Tensor:
        return self.images[torch.from_numpy(samples)]


class SyntheticImages:
    """Half a coarse pattern of the sample's class, half one of 64 fields of noise, made when they are read."""

    def __init__(self, settings: SyntheticSettings, image_size: int, length: int, part: int) -> None:
        generator = np.random.Generator(np.random.Philox(key=SYNTHETIC))
        shape = (settings.channels, 4, 4)
        self.patterns = torch.from_numpy(generator.integers(0, 128, (settings.classes, *shape), np.uint8))
        noise_shape = (64, settings.channels, image_size, image_size)
        self.noise = torch.from_numpy(generator.integers(0, 128, noise_shape, np.uint8))
        label_words, noise_words, *_ = draw(SYNTHETIC, part, np.arange(length), 0)
        self.labels = torch.from_numpy(draw_below(settings.classes, label_words))
        self.noise_of = torch.from_numpy(draw_below(len(self.noise), noise_words))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, samples: Samples) -> torch.Tensor:
        chosen = torch.from_numpy(samples)
        patterns = F.interpolate(self.patterns[self.labels[chosen]], size=self.noise.shape[-2:])
        return patterns + self.noise[self.noise_of[chosen]]


def load_data_set(settings: DataSettings) -> DataSet:
    if settings.source in NAMED_SOURCES:
        return NAMED_SOURCES[settings.source](settings)
    path = Path(settings.source)
    try:
        if path.suffix == ".npz":
            return from_arrays(settings, read_npz(path), path)
        if path.is_dir():
            return from_arrays(settings, read_idx_folder(path), path)
    except OSError as error:
        raise UserError(f"data.source={settings.source!r} cannot be read ({error.strerror}); give another") from error
    raise UserError(
        f"data.source={settings.source!r} is neither a folder of IDX files, nor an .npz file, nor one of "
        f"{', '.join(NAMED_SOURCES)}; nearest: data.source={nearest(settings.source, NAMED_SOURCES)}"
    )


def foresee_shape(settings: DataSettings) -> DataShape:
    """What `load_data_set` will find.  Sets with a name need not be there for it."""
    if settings.source in NAMED_SHAPES:
        return NAMED_SHAPES[settings.source](settings.synthetic)
    return load_data_set(settings).shape


def embedded(settings: DataSettings) -> DataSet:
    with resources.as_file(resources.files("megabatch.data") / "embedded" / EMBEDDED) as path:
        return from_arrays(settings, read_npz(path), path)


def full_fashion_mnist(settings: DataSettings) -> DataSet:
    if not FASHION_MNIST.is_dir():
        raise UserError(
            f"data.source='fashion-mnist' is read from {FASHION_MNIST}, which does not exist; "
            "remedy: apt-get install dataset-fashion-mnist, or give the folder of its four IDX files"
        )
    arrays = read_idx_folder(FASHION_MNIST) | {"class_names": np.array(FASHION_CLASSES)}
    return from_arrays(settings, arrays, FASHION_MNIST)


def imagenet(settings: DataSettings) -> DataSet:
    raise UserError(
        "data.source='imagenet': JPEG files cannot be read yet, only planned for (show, --dry-run); for a trial "
        f"data.source=synthetic data.synthetic.train={IMAGENET.num_train} "
        f"data.synthetic.classes={IMAGENET.num_classes}, or give an .npz"
    )


def synthetic(settings: DataSettings) -> DataSet:
    made = settings.synthetic
    train, test = (
        SyntheticImages(made, settings.image_size, length, part) for part, length in enumerate((made.train, made.test))
    )
    return DataSet(train, test, tuple(f"class {index}" for index in range(made.classes)), made.channels)


NAMED_SOURCES: dict[str, Callable[[DataSettings], DataSet]] = {
    "fashion-mnist-10k": embedded,
    "fashion-mnist": full_fashion_mnist,
    "imagenet": imagenet,
    "synthetic": synthetic,
}

NAMED_SHAPES: dict[str, Callable[[SyntheticSettings], DataShape]] = {
    "fashion-mnist-10k": lambda made: FASHION_MNIST_10K,
    "fashion-mnist": lambda made: FULL_FASHION_MNIST,
    "imagenet": lambda made: IMAGENET,
    "synthetic": lambda made: DataShape(
        num_train=made.train, num_test=made.test, num_classes=made.classes, num_channels=made.channels
    ),
}


def read_npz(path: Path) -> Arrays:
    """train_images, train_labels, test_images, test_labels and, if it is there, class_names."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; data.source names an .npz file, a folder of IDX files, or a known set")
    try:
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not an .npz archive; make it anew with numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in ARRAYS if name not in archive]
            if missing:
                raise UserError(f"{path} has no array {missing[0]!r}; it must hold {', '.join(ARRAYS)}")
            return {name: archive[name] for name in (*ARRAYS, "class_names") if name in archive}
    except UserError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read as .npz arrays ({error}); make it anew with numpy.savez") from error


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


def from_arrays(settings: DataSettings, arrays: Arrays, path: Path) -> DataSet:
    parts = {
        part: array_images(settings, arrays[f"{part}_images"], arrays[f"{part}_labels"], f"{path}: {part}")
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


def array_images(
    settings: DataSettings, images: NDArray[np.generic], labels: NDArray[np.generic], where: str
) -> ArrayImages:
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
    size = (settings.image_size, settings.image_size)
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size=size, mode="bilinear", antialias=True)
    return ArrayImages(pixels, torch.from_numpy(labels.astype(np.int64)))
