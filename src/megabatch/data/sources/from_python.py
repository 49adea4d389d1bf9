"""Images that a program hands over: arrays, tensors, a torch Dataset or a DataLoader, read as an `ImageSet`."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from megabatch.data.pipeline.images import ArrayImages, ImageSet
from megabatch.data.pipeline.order import Samples
from megabatch.data.sources.shapes import MOST_CLASSES
from megabatch.errors import UserError

Array = torch.Tensor | NDArray[Any]
ARRAYS = (torch.Tensor, np.ndarray)
WANTED = (
    "expected (images, labels) as arrays or tensors, a torch Dataset or DataLoader of (image, label), or an ImageSet"
)
LABELS = f"labels number the classes from 0 to {MOST_CLASSES - 1}"
COLOURS = (1, 3)  # channels, of which the last dimension may be
COMPARED = 8  # labels, with those of the items themselves
MANY = 10_000  # items, for which it takes a while to read all of them
WHOLE_ORDERS = (SequentialSampler, RandomSampler, DistributedSampler)  # every sample, in some order
NO_DATASETS = (str, bytes, list, tuple, dict, set, np.ndarray, torch.Tensor)
# A Dataset is written to be used by one thread, and those of training and test images may be parts of one.
READING = threading.Lock()


def as_image_set(given: Any, name: str, report: Callable[[str], None]) -> ImageSet:
    """`name` is what messages call it; `report` hears what is not used of a DataLoader."""
    if isinstance(given, DataLoader):
        require_whole_order(given, name)
        report(f"{name}: of the DataLoader its dataset is read; its batching, shuffling and workers are not used")
        given = given.dataset
    if isinstance(given, tuple | list) and len(given) == 2:
        return from_arrays(given[0], given[1], name)
    if all(hasattr(given, part) for part in ("labels", "read", "__len__")):
        return given  # type: ignore[no-any-return]
    is_sequence = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    if not is_sequence or isinstance(given, NO_DATASETS):
        kind = type(given).__name__
        lacking = ", which has no __getitem__ and __len__" if hasattr(given, "__iter__") and not is_sequence else ""
        raise UserError(f"{name} is of type {kind}{lacking}; {WANTED}")
    return DatasetImages(given, name, report)


def require_whole_order(loader: Any, name: str) -> None:
    """A sampler that leaves samples out, or takes some more often, means something: megabatch would not."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset) and not isinstance(sampler, WHOLE_ORDERS):
        raise UserError(
            f"{name}: the DataLoader's {type(sampler).__name__} chooses samples, and here every sample is seen once an "
            "epoch; pass the dataset, or some of it as a torch.utils.data.Subset"
        )


def from_arrays(pixels: Any, labels: Any, name: str) -> ArrayImages:
    if not isinstance(pixels, ARRAYS):
        raise UserError(f"{name}: images are of type {type(pixels).__name__}; {WANTED}")
    numbers = to_labels(labels, name)
    if not is_uint8(pixels) or pixels.ndim not in (3, 4) or not len(pixels) or numbers.shape != (len(pixels),):
        raise UserError(
            f"{name}: images are {pixels.dtype} {list(pixels.shape)}, labels {list(numbers.shape)}; "
            "expected uint8 [N, C, H, W], [N, H, W, C] with 1 or 3 channels, or [N, H, W], and [N]"
        )
    return ArrayImages(channels_first(to_tensor(pixels)), numbers)


def is_uint8(array: Array) -> bool:
    return str(array.dtype).removeprefix("torch.") == "uint8"


def channels_first(images: torch.Tensor) -> torch.Tensor:
    """[N, H, W] and [N, H, W, C] as [N, C, H, W]; where both ends could be channels, they come first."""
    if images.ndim == 3:
        return images[:, None]
    if images.shape[-1] in COLOURS and images.shape[1] not in COLOURS:
        return images.permute(0, 3, 1, 2).contiguous()
    return images


def to_tensor(array: Array) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    with warnings.catch_warnings():  # of an array that is not writable; nobody writes
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(array))


def to_labels(labels: Any, name: str) -> torch.Tensor:
    try:
        given = to_tensor(labels if isinstance(labels, ARRAYS) else np.asarray(labels)).cpu()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name}: labels are no integers ({error}); expected one integer from 0 for each image"
        ) from error
    if given.dtype == torch.uint64:  # torch computes little with it; 2^63 and more stay too large
        given = torch.from_numpy(given.numpy().astype(np.float64))
    if given.is_complex():
        raise UserError(f"{name}: labels are {given.dtype}; expected one integer from 0 for each image")
    numbers = given.long()
    if not torch.equal(numbers.to(given.dtype), given) or (numbers < 0).any():
        wrong = given[(numbers.to(given.dtype) != given) | (numbers < 0)][0].item()
        raise UserError(f"{name}: there is a label {wrong}; expected integers from 0")
    if numbers.numel() and int(numbers.max()) >= MOST_CLASSES:
        raise UserError(f"{name}: there is a label {int(numbers.max())}; {LABELS}")
    return numbers


class DatasetImages:
    """A map-style Dataset of (image, label).  All images are of the size and the channels of the first."""

    def __init__(self, dataset: Any, name: str, report: Callable[[str], None]) -> None:
        self.dataset, self.name, self.length = dataset, name, len(dataset)
        if not self.length:
            raise UserError(f"{name}: {type(dataset).__name__} is empty; it must have an item at least")
        self.shape: torch.Size | None = None
        self.shape = self.item(0)[0].shape
        found = listed_labels(dataset)
        if found is None or not self.agrees(found):
            if self.length >= MANY:
                kind = type(dataset).__name__
                report(
                    f"{name}: all {self.length:,} items of {kind} are read for their labels; `targets` would list them"
                )
            found = [self.item(number)[1] for number in range(self.length)]
        self.labels = to_labels(found, name)

    def __len__(self) -> int:
        return self.length

    def read(self, samples: Samples) -> torch.Tensor:
        return torch.stack([self.item(number)[0] for number in samples.tolist()])

    def item(self, number: int) -> tuple[torch.Tensor, int]:
        """uint8 [C, H, W], and the label."""
        with READING:
            item = self.dataset[number]
        where = f"{self.name}: item {number} of {type(self.dataset).__name__}"
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{where} is of type {type(item).__name__}; expected (image, label)")
        image = to_pixels(item[0], where, None if self.shape is None else self.shape[0])
        if self.shape is not None and image.shape != self.shape:
            raise UserError(
                f"{where} is {list(image.shape)}, and item 0 is {list(self.shape)}; make all the same size, such "
                "as with torchvision.transforms.Resize((64, 64)) as the Dataset's transform"
            )
        try:
            return image, int(item[1])
        except (TypeError, ValueError) as error:
            raise UserError(f"{where} has a label of type {type(item[1]).__name__}; expected an integer") from error

    def agrees(self, labels: Sequence[int]) -> bool:
        """Whether some items have the labels that are listed: a Dataset may change them as it reads."""
        some = np.linspace(0, self.length - 1, min(COMPARED, self.length), dtype=np.int64).tolist()
        return all(self.item(number)[1] == labels[number] for number in some)


def listed_labels(dataset: Any) -> list[int] | None:
    """What the Dataset lists as `targets` or `labels`, so that not every item need be read for them."""
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
    """uint8 [C, H, W] of a PIL image or an array.  `channels` are those of the first image, which others follow."""
    if isinstance(image, Image.Image):
        is_grey = image.mode in ("1", "L") if channels is None else channels == 1
        image = np.array(image.convert("L" if is_grey else "RGB"))
    if not isinstance(image, ARRAYS) or not is_uint8(image) or image.ndim not in (2, 3):
        got = f"{image.dtype} {list(image.shape)}" if isinstance(image, ARRAYS) else f"of type {type(image).__name__}"
        raise UserError(
            f"{where} has an image {got}; expected a PIL image or uint8 [C, H, W], [H, W, C] or [H, W]: leave out "
            "ToTensor and Normalize, pixels are normalised here"
        )
    return channels_first(to_tensor(image)[None])[0]
