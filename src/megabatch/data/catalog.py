"""Where images come from: `load_data_set` turns the recipe's `data` section into a training and a test `ImageSet`."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import resources
from itertools import permutations
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from megabatch.data.pack.shards import holds_shards, read_shards
from megabatch.data.pipeline.decode import Unreadable, read_size
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import DataSet, ImageSet, ImageSubset, SyntheticImages
from megabatch.data.pipeline.order import PER_CLASS, VALIDATION, draw
from megabatch.data.settings import CENTER_CROP, DataSettings
from megabatch.data.sources.arrays import from_arrays, is_idx_folder, read_idx_folder, read_npz
from megabatch.data.sources.files import EncodedDataset, EncodedFiles, Subset, concatenate, with_classes
from megabatch.data.sources.folders import FolderFiles, read_folder, warn_of_classes
from megabatch.data.sources.labels import named_like_splits
from megabatch.data.sources.shapes import KNOWN_SETS, DataShape
from megabatch.errors import UserError, nearest
from megabatch.text import is_plain, one_line

# How large encoded images are, as they are stored: from the headers of a few.

LOOKED_AT = 50  # images, evenly spread, as a set may be sorted


def median_side(files: EncodedFiles, max_pixels: int) -> float | None:
    """Of their shorter sides; None where none can be read."""
    sides = []
    for number in np.linspace(0, len(files) - 1, LOOKED_AT, dtype=np.int64).tolist():
        try:
            sides.append(min(read_size(files.content(number), max_pixels)[:2]))
        except (OSError, Unreadable):
            continue
    return float(np.median(sides)) if sides else None


FROM_PYTHON = "python:"  # begins the source of a run whose images were handed to `megabatch.fit`
EMBEDDED = "fashion_mnist_10k.npz"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it
FASHION_CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")


class NoSource(UserError):
    """There are no images where the recipe says that they are."""


def load_data_set(settings: DataSettings, threads: int = 1) -> DataSet:
    """`threads` is how many a rank decodes with, where images have to be decoded."""
    source = find_source(settings)
    if isinstance(source, EncodedDataset):
        return from_encoded(settings, source, threads)
    if settings.also:
        raise UserError(
            f"data.also={settings.also}: only folders and tars can be joined, and data.source={settings.source!r} is "
            "neither; leave it out"
        )
    if settings.train_per_class is not None:
        labels = source.train.labels.numpy()
        chosen = some_of_each_class(settings, settings.train_per_class, labels, source.class_names, settings.source)
        source = replace(source, train=ImageSubset(source.train, chosen))
    share = settings.held_out(has_tests=True)
    return hold_out(settings, share, source) if share else source


def load_other_images(settings: DataSettings, names: Sequence[str], num_channels: int, threads: int) -> ImageSet:
    """Images to test a model of these classes on: a source's test part, or all of a folder or tar that has none."""
    source = find_source(settings)
    if isinstance(source, EncodedDataset):
        unknown = sorted({*source.class_names} - {*names})
        if unknown or num_channels != 3:
            reason = f"images of class {unknown[0]!r}" if unknown else "3 channels"
            is_folder = isinstance(source.train, FolderFiles) and named_like_splits(unknown[:1])
            other = Path(settings.source, unknown[0]) if is_folder else "another source"
            raise UserError(f"{settings.source} has {reason}, on which the run was not trained; give {other}")
        files = source.train if source.test is None else source.test
        return EncodedImages(with_classes(files, source.class_names, tuple(names)), settings, threads)
    if source.num_channels != num_channels or len(source.class_names) > len(names):
        raise UserError(
            f"{settings.source} has {source.num_channels} channels and {len(source.class_names)} classes; the run was "
            f"trained on {num_channels} and {len(names)}; give another source"
        )
    return source.test


def find_source(settings: DataSettings) -> DataSet | EncodedDataset:
    if settings.source in NAMED_SOURCES:
        return NAMED_SOURCES[settings.source](settings)
    if not settings.source:
        raise NoSource("data.source is not set; give data.source=FOLDER, with a folder of images for each class")
    if not is_plain(settings.source):
        raise UserError(f"data.source={one_line(settings.source)!r} is no path of plain text; give another")
    path = Path(settings.source)
    try:
        if path.suffix == ".npz":
            return from_arrays(read_npz(path), settings.image_size, path)
        if is_idx_folder(path):
            return from_arrays(read_idx_folder(path), settings.image_size, path)
        if path.is_dir() or path.suffix == ".tar":
            return read_encoded(path)
    except OSError as error:
        raise UserError(f"data.source={settings.source!r} cannot be read ({error.strerror}); give another") from error
    if not path.exists() and not get_close_matches(settings.source, NAMED_SOURCES):
        raise NoSource(
            f"data.source={settings.source!r} does not exist; give a folder with a folder of images for each class, or "
            f"a .tar or .npz file, or one of {', '.join(NAMED_SOURCES)}"
        )
    raise UserError(
        f"data.source={settings.source!r} is neither a folder (of class folders, tars or IDX files), nor a .tar or .npz"
        f" file, nor one of {', '.join(NAMED_SOURCES)}; nearest: data.source={nearest(settings.source, NAMED_SOURCES)}"
    )


def read_encoded(path: Path) -> EncodedDataset:
    """Encoded images: tars, alone or in a folder, or class folders."""
    try:
        return read_shards(path) if holds_shards(path) else read_folder(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give another") from error


def from_encoded(settings: DataSettings, dataset: EncodedDataset, threads: int) -> DataSet:
    for also in settings.also:
        path = Path(also)
        if not path.is_dir() and path.suffix != ".tar":
            raise UserError(f"data.also={settings.also}: {also} is neither a folder nor a .tar file; leave it out")
        dataset = concatenate(dataset, read_encoded(path))
    train, test = dataset.train, dataset.test
    if settings.train_per_class is not None:
        names, place = dataset.class_names, dataset.place
        train = Subset(train, some_of_each_class(settings, settings.train_per_class, train.labels, names, place))
    share = settings.held_out(has_tests=test is not None)
    if share:
        kept, held_out = split(settings, share, train.labels, dataset.class_names, dataset.place)
        train, test = Subset(train, kept), Subset(train, held_out)
    if test is None:
        raise UserError(
            f"{dataset.place} has no test images (a val folder, or val-*.tar); "
            "take some of the training images with data.validation=0.1"
        )
    require_all_classes(dataset.class_names, train.labels, test.labels, dataset.place)
    are_small = settings.center_crop == "auto" and seem_small(dataset.train, settings)
    train_images, test_images = (EncodedImages(files, settings, threads, are_small) for files in (train, test))
    is_told = share > 0 and settings.validation != "auto"
    return DataSet(
        train_images,
        test_images,
        dataset.class_names,
        num_channels=3,
        tested_on="" if is_told else describe_tests(test, share),
        warnings=warn_of_classes(dataset),
    )


def describe_tests(test: EncodedFiles, share: float) -> str:
    if share:
        return f"{share:.0%} of each class, held out"
    return f"its own {test.folder.name}/" if isinstance(test, FolderFiles) else "its own test images"


def seem_small(files: EncodedFiles, settings: DataSettings) -> bool:
    """Whether the middle of most images has fewer pixels than training sees: it would be enlarged, the edge lost.

    Of the set as a whole: all its images are seen in the same way.
    """
    side = median_side(files, settings.max_pixels)
    return side is not None and round(CENTER_CROP * side) < settings.image_size


def require_all_classes(
    names: tuple[str, ...], train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], place: str
) -> None:
    counts = [np.bincount(labels, minlength=len(names)) for labels in (train_labels, test_labels)]
    for (part, here), (other, there) in permutations(zip(("training", "test"), counts, strict=True)):
        missing = np.flatnonzero((here == 0) & (there > 0))
        if len(missing):
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            raise UserError(
                f"{place} has no {part} image of class {names[missing[0]]!r}{more}, of which it has {other} images; "
                "add some, or take test images from the training images with data.validation=0.1"
            )


def hold_out(settings: DataSettings, share: float, data: DataSet) -> DataSet:
    kept, held_out = split(settings, share, data.train.labels.numpy(), data.class_names, settings.source)
    return replace(data, train=ImageSubset(data.train, kept), test=ImageSubset(data.train, held_out))


def split(
    settings: DataSettings, share: float, labels: NDArray[np.int64], class_names: tuple[str, ...], place: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples to train on and those to test on: of each class the same share, at least one, chosen by the seed."""
    high, low, *_ = draw(settings.validation_seed, VALIDATION, np.arange(len(labels)), 0)
    by_class = np.lexsort((low, high, labels))  # the samples of each class in random order
    counts = np.bincount(labels, minlength=len(class_names))
    if 1 in counts:
        name = class_names[int(np.flatnonzero(counts == 1)[0])]
        raise UserError(
            f"data.validation={share:g}: class {name!r} of {place} has 1 training image; it must have two at least"
        )
    # A class without images, as where numbers of classes have gaps, has none to hold out.
    wanted = np.where(counts, np.clip(np.round(share * counts), 1, counts - 1), 0).astype(np.int64)
    places = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the class
    held_out = places < np.repeat(wanted, counts)
    return np.sort(by_class[~held_out]), np.sort(by_class[held_out])


def some_of_each_class(
    settings: DataSettings, wanted: int, labels: NDArray[np.int64], class_names: tuple[str, ...], place: str
) -> NDArray[np.int64]:
    """`wanted` training images of each class, chosen by the seed.  More of them hold the fewer."""
    counts = np.bincount(labels, minlength=len(class_names))
    for name, count in zip(class_names, counts, strict=True):
        if 0 < count < wanted:  # a class without images has none to choose from, as in `split`
            raise UserError(
                f"data.train_per_class={wanted}: class {name!r} of {place} has {count:,} training images; "
                f"nearest: data.train_per_class={min(counts[counts > 0])}"
            )
    high, low, *_ = draw(settings.validation_seed, PER_CLASS, np.arange(len(labels)), 0)
    by_class = np.lexsort((low, high, labels))
    places = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the class
    return np.sort(by_class[places < wanted])


def infer_shape(settings: DataSettings) -> DataShape:
    """Return the shape that `load_data_set` will find.  It needs no images of a set with a name."""
    share = settings.held_out(has_tests=True)
    if settings.source in KNOWN_SETS and not settings.also:
        return KNOWN_SETS[settings.source].part(settings.train_per_class, share)
    if settings.source == "synthetic" and settings.train_per_class is None and not share and not settings.also:
        made = settings.synthetic
        return DataShape(num_train=made.train, num_test=made.test, num_classes=made.classes, num_channels=made.channels)
    return load_data_set(settings).shape


def embedded(settings: DataSettings) -> DataSet:
    with resources.as_file(resources.files("megabatch.data") / "embedded" / EMBEDDED) as path:
        return from_arrays(read_npz(path), settings.image_size, path)


def full_fashion_mnist(settings: DataSettings) -> DataSet:
    if not FASHION_MNIST.is_dir():
        raise NoSource(
            f"data.source='fashion-mnist' is read from {FASHION_MNIST}, which does not exist; "
            "remedy: apt-get install dataset-fashion-mnist, or give the folder of its four IDX files"
        )
    arrays = read_idx_folder(FASHION_MNIST) | {"class_names": np.array(FASHION_CLASSES)}
    return from_arrays(arrays, settings.image_size, FASHION_MNIST)


def imagenet(settings: DataSettings) -> EncodedDataset:
    if not Path("imagenet").is_dir():
        raise NoSource(
            "data.source='imagenet' is the folder imagenet where the command is run, and there is none; give "
            "data.source=FOLDER, in which train/ and val/ hold a folder for each class, or a pack of it"
        )
    return read_encoded(Path("imagenet"))


def synthetic(settings: DataSettings) -> DataSet:
    made = settings.synthetic
    train, test = (
        SyntheticImages(made, settings.image_size, length, part) for part, length in enumerate((made.train, made.test))
    )
    return DataSet(train, test, tuple(f"class {index}" for index in range(made.classes)), made.channels)


NAMED_SOURCES: dict[str, Callable[[DataSettings], DataSet | EncodedDataset]] = {
    "fashion-mnist-10k": embedded,
    "fashion-mnist": full_fashion_mnist,
    "imagenet": imagenet,
    "synthetic": synthetic,
}
