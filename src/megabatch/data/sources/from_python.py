"""Converts Python objects to an `ImageSet`: arrays, tensors, a torch Dataset or a DataLoader."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from megabatch.data.pipeline.images import ArrayImages, ImageSet, ImageSubset
from megabatch.data.pipeline.order import Samples
from megabatch.data.sources.shapes import MOST_CLASSES
from megabatch.errors import UserError

Array = torch.Tensor | NDArray[Any]
ARRAYS = (torch.Tensor, np.ndarray)
WANTED = (
    "expected (images, labels) as arrays or tensors, a torch Dataset or DataLoader of (image, label), or an ImageSet"
)
CHANNEL_COUNTS = (1, 3)  # that the last dimension may have
COMPARED = 8  # labels that are compared with those of the items
MANY = 10_000  # items; reading all of them takes a while
FULL_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)  # these return every sample once
NOT_DATASETS = (str, bytes, list, tuple, dict, set, np.ndarray, torch.Tensor)
# Datasets are written for one thread, and those of training and test images may share state.
READING = threading.Lock()


def as_image_set(source: Any, name: str, report: Callable[[str], None]) -> ImageSet:
    """Convert `source` to an image set.

    Args:
        source: (images, labels), a Dataset, a DataLoader or an ImageSet.
        name: The name of the source in messages.
        report: Called with a message about ignored parts of a DataLoader, or about a slow scan for labels.
    """
    if isinstance(source, DataLoader):
        require_all_samples(source, name)
        report(f"{name}: only the dataset of the DataLoader is used, not its batching, shuffling and workers")
        source = source.dataset
    if isinstance(source, tuple | list) and len(source) == 2:
        return from_arrays(source[0], source[1], name)
    if all(hasattr(source, part) for part in ("labels", "read", "__len__")):
        return source  # type: ignore[no-any-return]
    is_sequence = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if not is_sequence or isinstance(source, NOT_DATASETS):
        kind = type(source).__name__
        lacking = ", which has no __getitem__ and __len__" if hasattr(source, "__iter__") and not is_sequence else ""
        raise UserError(f"{name} is of type {kind}{lacking}; {WANTED}")
    return DatasetImages(source, name, report)


def require_all_samples(loader: Any, name: str) -> None:
    """Refuse a sampler that omits or repeats samples, because megabatch would ignore it."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset) and not isinstance(sampler, FULL_SAMPLERS):
        raise UserError(
            f"{name}: the DataLoader's {type(sampler).__name__} chooses samples, but megabatch uses every sample once "
            "per epoch; pass the dataset, or a part of it as torch.utils.data.Subset"
        )


def from_arrays(pixels: Any, labels: Any, name: str) -> ArrayImages:
    if not isinstance(pixels, ARRAYS):
        raise UserError(f"{name}: images are of type {type(pixels).__name__}; {WANTED}")
    numbers = to_labels(labels, name)
    is_table = numbers.ndim == 2 and numbers.shape[1] > 1
    are_labels = (numbers.ndim == 1 or is_table) and len(numbers) == len(pixels) > 0
    if not is_uint8(pixels) or pixels.ndim not in (3, 4) or not are_labels:
        raise UserError(
            f"{name}: images are {pixels.dtype} {list(pixels.shape)}, labels {list(numbers.shape)}; "
            "expected uint8 [N, C, H, W], [N, H, W, C] with 1 or 3 channels, or [N, H, W], and [N] or [N, classes]"
        )
    return ArrayImages(channels_first(to_tensor(pixels)), numbers)


def is_uint8(array: Array) -> bool:
    return str(array.dtype).removeprefix("torch.") == "uint8"


def channels_first(images: torch.Tensor) -> torch.Tensor:
    """Convert [N, H, W] and [N, H, W, C] to [N, C, H, W].  If both could be channels, the first dimension is taken."""
    if images.ndim == 3:
        return images[:, None]
    if images.shape[-1] in CHANNEL_COUNTS and images.shape[1] not in CHANNEL_COUNTS:
        return images.permute(0, 3, 1, 2).contiguous()
    return images


def to_tensor(array: Array) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():  # torch warns of read-only arrays; the tensor is never written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))


def to_labels(labels: Any, name: str) -> torch.Tensor:
    try:
        values = to_tensor(labels if isinstance(labels, ARRAYS) else np.asarray(labels)).cpu()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name}: labels are not integers ({error}); expected one non-negative integer per image"
        ) from error
    if values.dtype == torch.uint64:  # torch supports few operations on it; values from 2^63 on remain too large
        values = torch.from_numpy(values.numpy().astype(np.float64))
    if values.is_complex():
        raise UserError(f"{name}: labels are {values.dtype}; expected one non-negative integer per image")
    numbers = values.long()
    if not torch.equal(numbers.to(values.dtype), values) or (numbers < 0).any():
        wrong = values[(numbers.to(values.dtype) != values) | (numbers < 0)][0].item()
        raise UserError(f"{name} has a label {wrong}; expected one non-negative integer per image")
    if numbers.numel() and int(numbers.max()) >= MOST_CLASSES:
        raise UserError(f"{name} has a label {int(numbers.max())}; labels must be from 0 to {MOST_CLASSES - 1}")
    return numbers


def number_label_sets(parts: Sequence[ImageSet]) -> tuple[list[ImageSet], torch.Tensor | None]:
    """Return images whose labels number the rows of the returned table, bool [rows, classes].

    If the labels are class numbers, return the same images and None.
    """
    shapes = [list(part.labels.shape) for part in parts]
    if all(len(shape) == 1 for shape in shapes):
        return list(parts), None
    if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise UserError(f"labels are {shapes[0]} and {shapes[1]}; expected [N] twice, or [N, classes] twice")
    labels = torch.cat([part.labels for part in parts])
    if int(labels.max()) > 1:
        raise UserError(
            f"labels [N, classes] have a {int(labels.max())}; expected 1 for each label of an image, else 0"
        )
    table, numbers = labels.unique(dim=0, return_inverse=True)
    numbered = [ImageSubset(part, np.arange(len(part))) for part in parts]
    for part, found in zip(numbered, numbers.split(list(map(len, parts))), strict=True):
        part.labels = found
    return list(numbered), table.bool()


class DatasetImages:
    """A map-style Dataset of (image, label), whose images have the same size and number of channels."""

    def __init__(self, dataset: Any, name: str, report: Callable[[str], None]) -> None:
        self.dataset, self.name, self.length = dataset, name, len(dataset)
        if not self.length:
            raise UserError(f"{name}: {type(dataset).__name__} is empty; it must have at least one item")
        self.shape: torch.Size | None = None
        self.shape = self.item(0)[0].shape
        found: Sequence[int | NDArray[Any]] | None = listed_labels(dataset)
        if found is None or not self.agrees(found):
            if self.length >= MANY:
                kind = type(dataset).__name__
                report(
                    f"{name}: reading all {self.length:,} items of {kind} for their labels; "
                    "give it a list `targets` to avoid this"
                )
            found = [self.item(number)[1] for number in range(self.length)]
        self.labels = to_labels(found, name)

    def __len__(self) -> int:
        return self.length

    def read(self, samples: Samples) -> torch.Tensor:
        return torch.stack([self.item(number)[0] for number in samples.tolist()])

    def item(self, number: int) -> tuple[torch.Tensor, int | NDArray[Any]]:
        """Return the image, uint8 [C, H, W], and the label or the row of labels."""
        with READING:
            item = self.dataset[number]
        where = f"{self.name}: item {number} of {type(self.dataset).__name__}"
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{where} is of type {type(item).__name__}; expected (image, label)")
        image = to_pixels(item[0], where, None if self.shape is None else self.shape[0])
        if self.shape is not None and image.shape != self.shape:
            raise UserError(
                f"{where} is {list(image.shape)}, but item 0 is {list(self.shape)}; resize all images, for example "
                "with torchvision.transforms.Resize((64, 64)) as the Dataset's transform"
            )
        try:
            is_row = isinstance(item[1], ARRAYS) and item[1].ndim == 1 and len(item[1]) > 1
            return image, np.asarray(item[1]) if is_row else int(item[1])
        except (TypeError, ValueError) as error:
            raise UserError(f"{where} has a label of type {type(item[1]).__name__}; expected an integer") from error

    def agrees(self, labels: Sequence[int | NDArray[Any]]) -> bool:
        """Return whether some items have the listed labels: a Dataset may change labels when it reads an item."""
        some = np.linspace(0, self.length - 1, min(COMPARED, self.length), dtype=np.int64).tolist()
        return all(np.array_equal(self.item(number)[1], labels[number]) for number in some)


def listed_labels(dataset: Any) -> list[int] | None:
    """Return the `targets` or `labels` of a Dataset, which avoid reading every item, or None."""
    if isinstance(dataset, Subset):
        whole = listed_labels(dataset.dataset)
        return None if whole is None else [whole[number] for number in dataset.indices]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for name in ("targets", "labels"):
        listed = getattr(dataset, name, None)
        array = np.asarray(listed) if isinstance(listed, (list, tuple, *ARRAYS)) else np.empty(0)
        if array.dtype.kind in "iu" and array.shape == (len(dataset),):
            return [int(label) for label in array]
    return None


def to_pixels(image: Any, where: str, channels: int | None) -> torch.Tensor:
    """Convert a PIL image or an array to uint8 [C, H, W].  `channels` is the number of the first image's channels."""
    if isinstance(image, Image.Image):
        is_grey = image.mode in ("1", "L") if channels is None else channels == 1
        image = np.array(image.convert("L" if is_grey else "RGB"))
    if not isinstance(image, ARRAYS) or not is_uint8(image) or image.ndim not in (2, 3):
        got = f"{image.dtype} {list(image.shape)}" if isinstance(image, ARRAYS) else f"of type {type(image).__name__}"
        raise UserError(
            f"{where} has an image {got}; expected a PIL image or uint8 [C, H, W], [H, W, C] or [H, W]; remove "
            "ToTensor and Normalize, because megabatch normalises pixels"
        )
    return channels_first(to_tensor(image)[None])[0]
