"""Data sources.  `load_data_set` turns the recipe's `data` section into a training and a test `ImageSet`."""

import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import resources
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from megabatch.data.pack.shards import holds_shards, read_shards
from megabatch.data.pipeline.decode import Unreadable, read_size
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import DataSet, ImageSet, ImageSubset, SyntheticImages
from megabatch.data.pipeline.order import PER_CLASS, VALIDATION, draw
from megabatch.data.settings import CENTER_CROP, DataSettings
from megabatch.data.sources.arrays import from_arrays, is_idx_folder, read_idx_folder, read_npz
from megabatch.data.sources.cifar import holds_cifar, read_cifar
from megabatch.data.sources.files import EncodedDataset, EncodedFiles, Subset, concatenate, with_classes
from megabatch.data.sources.folders import FolderFiles, read_folder, warn_of_classes, warn_of_ignored
from megabatch.data.sources.index import once_per_host
from megabatch.data.sources.labels import named_like_splits, split_lists
from megabatch.data.sources.shapes import KNOWN_SETS, DataShape
from megabatch.data.sources.table import SUFFIX, read_table
from megabatch.errors import UserError, nearest
from megabatch.io.numbers import plural
from megabatch.text import is_plain, listed, one_line

FROM_PYTHON = "python:"  # prefix of data.source in a run whose images were passed to `megabatch.fit`
EMBEDDED = "fashion_mnist_10k.npz"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # installed by Debian's package
FASHION_CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")
SIZE_SAMPLES = 50  # images whose headers are read, evenly spaced because a set may be sorted


class NoSource(UserError):
    """Error for a data source that does not exist."""


def load_data_set(settings: DataSettings, threads: int = 1) -> DataSet:
    """Load the training and test images.  A rank decodes encoded images with `threads` threads."""
    source = find_source(settings, settings.image_size)
    if isinstance(source, EncodedDataset):
        return from_encoded(settings, source, threads)
    if settings.also:
        raise UserError(
            f"data.also={settings.also}: only folders, CSV files and tars can be joined, but not "
            f"data.source={settings.source!r}; remove data.also"
        )
    if settings.train_per_class is not None:
        labels = source.train.labels.numpy()
        chosen = choose_per_class(settings, settings.train_per_class, labels, source.class_names, settings.source)
        source = replace(source, train=ImageSubset(source.train, chosen))
    tested = source if settings.test_side == settings.image_size else find_source(settings, settings.test_side)
    assert isinstance(tested, DataSet)
    share = settings.held_out(has_tests=True)
    if not share:
        return replace(source, test=tested.test)
    train, test = split(settings, share, source.train.labels.numpy(), source.class_names, settings.source)
    return replace(source, train=ImageSubset(source.train, train), test=ImageSubset(tested.train, test))


def load_other_images(
    settings: DataSettings, names: Sequence[str], num_channels: int, threads: int
) -> tuple[ImageSet, torch.Tensor | None]:
    """Return images to test a model of these classes on, and the label sets of multi-label images.

    They are the test part of the source, or all images of a folder or tar that has no test part.
    """
    source = find_source(settings, settings.test_side)
    if isinstance(source, EncodedDataset):
        source = with_label_sets(source) if settings.multi_label else source
        unknown = sorted({*source.class_names} - {*names})
        if unknown or num_channels != 3:
            reason = f"images of class {unknown[0]!r}" if unknown else "3 channels"
            is_folder = isinstance(source.train, FolderFiles) and named_like_splits(unknown[:1])
            other = Path(settings.source, unknown[0]) if is_folder else "another source"
            raise UserError(f"{settings.source} has {reason}, but the run was not trained on them; give {other}")
        files = source.train if source.test is None else source.test
        require_pixels(settings, source)
        sets = None
        if source.label_sets is None:
            files = with_classes(files, source.class_names, tuple(names))
        else:
            sets = torch.zeros(len(source.label_sets), len(names), dtype=torch.bool)
            sets[:, [names.index(name) for name in source.class_names]] = torch.from_numpy(source.label_sets)
        return EncodedImages(files, settings, threads, side=settings.test_side), sets
    if source.num_channels != num_channels or len(source.class_names) > len(names):
        raise UserError(
            f"{settings.source} has {source.num_channels} channels and {len(source.class_names)} classes, but the run "
            f"was trained on {num_channels} and {len(names)}; give another source"
        )
    return source.test, None


def require_one_label(settings: DataSettings) -> None:
    """Raise UserError for several labels per image, which images in memory do not have."""
    if settings.multi_label:
        raise UserError(
            f"data.multi_label=true: data.source={settings.source!r} has one label for each image; omit "
            "data.multi_label"
        )


def find_source(settings: DataSettings, side: int) -> DataSet | EncodedDataset:
    """Return the source: images in memory of this side, or files that are decoded to any side."""
    source = open_source(settings, side)
    if isinstance(source, DataSet):
        require_one_label(settings)
    return source


def open_source(settings: DataSettings, side: int) -> DataSet | EncodedDataset:
    if settings.source in NAMED_SOURCES:
        return NAMED_SOURCES[settings.source](settings, side)
    if not settings.source:
        raise NoSource("data.source is not set; give data.source=FOLDER, with a folder of images for each class")
    if not is_plain(settings.source):
        raise UserError(f"data.source={one_line(settings.source)!r} contains control characters; give another path")
    path = Path(settings.source)
    try:
        if path.suffix == ".npz":
            return from_arrays(read_npz(path), side, path)
        if is_idx_folder(path):
            return from_arrays(read_idx_folder(path), side, path)
        if holds_cifar(path):
            return from_arrays(read_cifar(path), side, path)
        if path.is_dir() or path.suffix in (".tar", SUFFIX):
            return read_encoded(path, settings.multi_label)
    except OSError as error:
        raise UserError(
            f"data.source={settings.source!r} cannot be read ({error.strerror}); check its permissions, or give another"
        ) from error
    if not path.exists() and not get_close_matches(settings.source, NAMED_SOURCES):
        raise NoSource(
            f"data.source={settings.source!r} does not exist; give a folder with a folder of images for each class, or "
            f"a .csv, .tar or .npz file, or CIFAR's binary version, or one of {', '.join(NAMED_SOURCES)}"
        )
    raise UserError(
        f"data.source={settings.source!r} is neither a folder (of class folders, tars, IDX files or CIFAR's binary "
        f"files), nor a .csv, .tar or .npz file, nor one of {', '.join(NAMED_SOURCES)}; nearest: "
        f"data.source={nearest(settings.source, NAMED_SOURCES)}"
    )


def has_index(settings: DataSettings) -> bool:
    """Return whether the images may be files in folders or tars, which are found through an index."""
    return settings.source not in NAMED_SOURCES or settings.source == "imagenet"


def read_encoded(path: Path, multi_label: bool = False) -> EncodedDataset:
    """Read a source of encoded images: a tar, a folder of tars, class folders, or a CSV file."""
    try:
        if path.suffix == SUFFIX and not path.is_dir():
            return read_table(path, multi_label)
        return read_shards(path) if holds_shards(path) else read_folder(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); check its permissions, or give another"
        ) from error


def with_label_sets(dataset: EncodedDataset) -> EncodedDataset:
    names, sets = split_lists(dataset.class_names, dataset.place)
    return replace(dataset, class_names=names, label_sets=sets)


def from_encoded(settings: DataSettings, dataset: EncodedDataset, threads: int) -> DataSet:
    for also in settings.also:
        path = Path(also)
        if not path.is_dir() and path.suffix not in (".tar", SUFFIX):
            raise UserError(f"data.also={settings.also}: {also} is neither a folder nor a .csv or .tar file; remove it")
        dataset = concatenate(dataset, read_encoded(path, settings.multi_label))
    dataset = with_label_sets(dataset) if settings.multi_label else dataset
    train, test = dataset.train, dataset.test
    if settings.train_per_class is not None:
        names, place = dataset.class_names, dataset.place
        train = Subset(train, choose_per_class(settings, settings.train_per_class, train.labels, names, place))
    share, sets = settings.held_out(has_tests=test is not None), dataset.label_sets
    if share:
        # A list of labels may have a single image, so multi-label images are held out without regard to their labels.
        strata, names = (train.labels, dataset.class_names) if sets is None else (0 * train.labels, ("all",))
        to_train, to_test = split(settings, share, strata, names, dataset.place)
        train, test = Subset(train, to_train), Subset(train, to_test)
    if test is None:
        raise UserError(
            f"{dataset.place} has no test images (a val folder, or val-*.tar); "
            "hold out some training images with data.validation=0.1"
        )
    warnings = warn_of_classes(dataset) + warn_of_ignored(dataset)
    if sets is None:
        require_all_classes(dataset.class_names, train.labels, test.labels, dataset.place)
        warnings += warn_of_gaps(dataset.class_names, train.labels, dataset.place)
    require_pixels(settings, dataset)
    are_small = settings.center_crop == "auto" and seem_small(dataset.train, settings)
    train_images = EncodedImages(train, settings, threads, are_small)
    test_images = EncodedImages(test, settings, threads, are_small, settings.test_side)
    is_set_by_user = share > 0 and settings.validation != "auto"
    return DataSet(
        train_images,
        test_images,
        dataset.class_names,
        num_channels=3,
        label_sets=None if sets is None else torch.from_numpy(sets),
        tested_on="" if is_set_by_user else describe_tests(test, share),
        warnings=warnings,
    )


def require_pixels(settings: DataSettings, dataset: EncodedDataset) -> None:
    """Raise UserError for test images that need more pixels than a pack with `--shorter-side` holds."""
    stored, wanted = dataset.shorter_side, settings.test_side
    if stored is None:
        return
    share = 1.0 if settings.center_crop == "auto" else settings.center_crop
    if wanted > round(share * stored):
        cropped = f", of which data.center_crop={share:g} is {round(share * stored)}" if share < 1 else ""
        name = "data.test_image_size" if settings.test_image_size else "data.image_size"
        raise UserError(
            f"{name}={wanted}: {dataset.place} was packed with --shorter-side {stored}{cropped}; "
            f"nearest: {name}={round(share * stored)}, or pack it again with --shorter-side "
            f"{math.ceil(wanted / share)}"
        )


def describe_tests(test: EncodedFiles, share: float) -> str:
    if share:
        return f"{share:.0%} of each class, held out"
    return f"its own {test.folder.name}/" if isinstance(test, FolderFiles) else "its own test images"


def seem_small(files: EncodedFiles, settings: DataSettings) -> bool:
    """Return whether the center crop of a typical image is smaller than test images.

    Such crops would be enlarged and would lose the edges for nothing.  The answer is for the set as a whole, so that
    all images are cropped in the same way.
    """
    key = f"sides {settings.source} {settings.max_pixels}"
    sides = once_per_host(key, lambda: {"sides": shorter_sides(files, settings.max_pixels)})["sides"]
    return len(sides) > 0 and round(CENTER_CROP * float(np.median(sides))) < settings.test_side


def median_side(files: EncodedFiles, max_pixels: int) -> float | None:
    """Return the median of the shorter sides of some images, or None if none of them can be read."""
    sides = shorter_sides(files, max_pixels)
    return float(np.median(sides)) if len(sides) else None


def shorter_sides(files: EncodedFiles, max_pixels: int) -> NDArray[np.int64]:
    sides = []
    for number in np.linspace(0, len(files) - 1, SIZE_SAMPLES, dtype=np.int64).tolist():
        try:
            sides.append(min(read_size(files.content(number), max_pixels)[:2]))
        except (OSError, Unreadable):
            continue
    return np.array(sides, np.int64)


def require_all_classes(
    names: tuple[str, ...], train_labels: NDArray[np.int64], test_labels: NDArray[np.int64], place: str
) -> None:
    counts = [np.bincount(labels, minlength=len(names)) for labels in (train_labels, test_labels)]
    for (part, here), (other, there) in permutations(zip(("training", "test"), counts, strict=True)):
        missing = np.flatnonzero((here == 0) & (there > 0))
        if len(missing):
            lacking = listed([repr(names[label]) for label in missing], 1)
            raise UserError(
                f"{place} has {other} images but no {part} image of class {lacking}; "
                "add some, or hold out test images from the training images with data.validation=0.1"
            )


def warn_of_gaps(names: tuple[str, ...], labels: NDArray[np.int64], place: str) -> tuple[str, ...]:
    """Return a warning if classes have no images.  Numeric names may be IDs."""
    empty = np.flatnonzero(np.bincount(labels, minlength=len(names)) == 0)
    if not len(empty):
        return ()
    which = f"{plural(len(empty), 'class', 'classes')} of {len(names):,}, such as {names[int(empty[0])]!r}"
    warning = f"{place} has no training images of {which}"
    if all(name.isdecimal() for name in names):
        warning += f"; numeric labels are class numbers: write IDs as text, such as id-{names[int(labels[0])]}"
    return (warning,)


def split(
    settings: DataSettings, share: float, labels: NDArray[np.int64], class_names: tuple[str, ...], place: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples to train on and the samples to test on.

    The same share of each class, and at least one image, is held out.  The seed chooses which.
    """
    counts = np.bincount(labels, minlength=len(class_names))
    if 1 in counts:
        name = class_names[int(np.flatnonzero(counts == 1)[0])]
        raise UserError(
            f"data.validation={share:g}: class {name!r} of {place} has 1 training image; it must have at least 2: add "
            "images, or remove the class"
        )
    # A class may have no images, if the class numbers have gaps.
    wanted = np.where(counts, np.clip(np.round(share * counts), 1, counts - 1), 0).astype(np.int64)
    samples, places = shuffle_classes(settings.validation_seed, VALIDATION, labels, counts)
    held_out = places < np.repeat(wanted, counts)
    return np.sort(samples[~held_out]), np.sort(samples[held_out])


def choose_per_class(
    settings: DataSettings, wanted: int, labels: NDArray[np.int64], class_names: tuple[str, ...], place: str
) -> NDArray[np.int64]:
    """Return `wanted` training images of each class, chosen by the seed.  A larger choice contains a smaller one."""
    counts = np.bincount(labels, minlength=len(class_names))
    for name, count in zip(class_names, counts, strict=True):
        if 0 < count < wanted:
            raise UserError(
                f"data.train_per_class={wanted}: class {name!r} of {place} has {count:,} training images; "
                f"nearest: data.train_per_class={min(counts[counts > 0])}"
            )
    samples, places = shuffle_classes(settings.validation_seed, PER_CLASS, labels, counts)
    return np.sort(samples[places < wanted])


def shuffle_classes(
    seed: int, stream: int, labels: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples sorted by class, in random order within each class, and their places within the class."""
    high, low, *_ = draw(seed, stream, np.arange(len(labels)), 0)
    return np.lexsort((low, high, labels)), np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)


def infer_shape(settings: DataSettings) -> DataShape:
    """Return the shape that `load_data_set` will find.  The images of a named set are not needed."""
    share = settings.held_out(has_tests=True)
    if settings.source in NAMED_SOURCES and settings.source != "imagenet":
        require_one_label(settings)
    if settings.source in KNOWN_SETS and not settings.also:
        return KNOWN_SETS[settings.source].part(settings.train_per_class, share)
    if settings.source == "synthetic" and settings.train_per_class is None and not share and not settings.also:
        size = settings.synthetic
        return DataShape(num_train=size.train, num_test=size.test, num_classes=size.classes, num_channels=size.channels)
    return load_data_set(settings).shape


def embedded(settings: DataSettings, side: int) -> DataSet:
    with resources.as_file(resources.files("megabatch.data") / "embedded" / EMBEDDED) as path:
        return from_arrays(read_npz(path), side, path)


def full_fashion_mnist(settings: DataSettings, side: int) -> DataSet:
    if not FASHION_MNIST.is_dir():
        raise NoSource(
            f"data.source='fashion-mnist' is read from {FASHION_MNIST}, which does not exist; "
            "run apt-get install dataset-fashion-mnist, or give the folder of its four IDX files"
        )
    arrays = read_idx_folder(FASHION_MNIST) | {"class_names": np.array(FASHION_CLASSES)}
    return from_arrays(arrays, side, FASHION_MNIST)


def imagenet(settings: DataSettings, side: int) -> EncodedDataset:
    if not Path("imagenet").is_dir():
        raise NoSource(
            "data.source='imagenet' is the folder ./imagenet, which does not exist; give data.source=FOLDER, "
            "with a folder for each class in train/ and in val/, or a pack of it"
        )
    return read_encoded(Path("imagenet"))


def synthetic(settings: DataSettings, side: int) -> DataSet:
    size = settings.synthetic
    train, test = (
        SyntheticImages(size, settings.image_size, length, part, side)
        for part, length in enumerate((size.train, size.test))
    )
    return DataSet(train, test, tuple(f"class {index}" for index in range(size.classes)), size.channels)


NAMED_SOURCES: dict[str, Callable[[DataSettings, int], DataSet | EncodedDataset]] = {
    "fashion-mnist-10k": embedded,
    "fashion-mnist": full_fashion_mnist,
    "imagenet": imagenet,
    "synthetic": synthetic,
}
