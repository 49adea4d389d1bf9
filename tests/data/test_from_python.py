"""Whatever a program hands over, the same images are the same set."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from megabatch.data.sources.from_python import as_image_set
from megabatch.errors import UserError

COLOURED = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 10, 12), np.uint8))
GREY = COLOURED[:, :1]
LABELS = torch.tensor([2, 0, 1, 1, 0, 2])


class Items(Dataset[Any]):
    """What a user may write."""

    def __init__(self, images: list[Any], labels: Any = LABELS) -> None:
        self.items: list[Any] = list(zip(images, labels, strict=False))
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        self.reads += 1
        return self.items[number]


class WithTargets(Items):
    target_transform = None

    def __init__(self, images: list[Any], targets: Any) -> None:
        super().__init__(images)
        self.targets = targets


def pictures(images: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()) for image in images]


def last(images: torch.Tensor) -> Any:
    return images.permute(0, 2, 3, 1).numpy()


def image_set(given: Any) -> Any:
    return as_image_set(given, "train", lambda line: None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((COLOURED, LABELS), COLOURED),
        ((COLOURED.numpy(), LABELS.numpy().astype(np.uint8)), COLOURED),
        ([COLOURED.numpy(), LABELS.tolist()], COLOURED),
        ((last(COLOURED), LABELS), COLOURED),
        ((last(COLOURED)[::-1].copy()[::-1], LABELS.double()), COLOURED),
        ((COLOURED.permute(0, 2, 3, 1), LABELS), COLOURED),
        ((GREY[:, 0].numpy(), LABELS.tolist()), GREY),
        ((last(GREY), LABELS), GREY),
        (Items(pictures(COLOURED)), COLOURED),
        (Items(pictures(GREY)), GREY),
        (Items(list(COLOURED), LABELS.tolist()), COLOURED),
        (Items(list(last(COLOURED)), LABELS.numpy()), COLOURED),
        (Items(list(GREY[:, 0])), GREY),
        (TensorDataset(COLOURED, LABELS), COLOURED),
        (DataLoader(TensorDataset(COLOURED, LABELS), batch_size=4, shuffle=True), COLOURED),
    ],
)
def test_the_same_images_are_the_same_set(given: Any, expected: torch.Tensor) -> None:
    images = image_set(given)
    assert len(images) == 6 and images.labels.dtype == torch.int64 and torch.equal(images.labels, LABELS)
    samples = np.array([4, 0, 4])
    assert torch.equal(images.read(samples), expected[samples])
    images.read(samples)[:] = 0  # a copy
    assert torch.equal(images.read(np.arange(6)), expected)


def test_where_both_ends_could_be_channels_they_come_first() -> None:
    images = torch.zeros(2, 3, 9, 3, dtype=torch.uint8)
    assert image_set((images, [0, 1])).read(np.arange(1)).shape == (1, 3, 9, 3)


def test_a_read_only_array_is_no_reason_for_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    pixels = COLOURED.numpy().copy()
    pixels.flags.writeable = False
    assert torch.equal(image_set((pixels, LABELS)).read(np.arange(6)), COLOURED) and not recwarn.list


@pytest.mark.parametrize("targets", [LABELS, LABELS.tolist(), LABELS.numpy()])
def test_labels_that_a_dataset_lists_are_not_read_item_by_item(targets: Any) -> None:
    items = WithTargets(pictures(GREY), targets)
    assert torch.equal(image_set(items).labels, LABELS)
    assert image_set(Subset(items, [5, 1, 2])).labels.tolist() == [2, 0, 1]
    many = WithTargets([], [])
    many.items, many.targets = [(COLOURED[0], number % 5) for number in range(1000)], [at % 5 for at in range(1000)]
    assert image_set(many).labels.tolist() == many.targets and many.reads < 20


def test_listed_labels_that_items_do_not_have_are_read_from_the_items() -> None:
    wrong = WithTargets(list(COLOURED), [label + 1 for label in LABELS.tolist()])
    assert torch.equal(image_set(wrong).labels, LABELS)
    changed = WithTargets(list(COLOURED), LABELS)
    changed.target_transform = int  # type: ignore[assignment]
    changed.items = [(image, 1) for image, _ in changed.items]
    assert image_set(changed).labels.tolist() == [1] * 6


def test_of_a_data_loader_one_line_says_what_is_not_used() -> None:
    said: list[str] = []
    as_image_set(DataLoader(Items(pictures(GREY)), num_workers=2), "test", said.append)
    assert said == ["test: of the DataLoader its dataset is read; its batching, shuffling and workers are not used"]


def test_a_large_dataset_that_lists_no_labels_is_said_to_be_read_for_them() -> None:
    said: list[str] = []
    many = Items([COLOURED[0]] * 10_000, [1] * 10_000)
    assert len(as_image_set(many, "train", said.append)) == 10_000
    assert said == ["train: all 10,000 items of Items are read for their labels; `targets` would list them"]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (COLOURED, r"^train is of type Tensor; expected \(images, labels\) as arrays or tensors, a torch Dataset or"),
        (None, r"^train is of type NoneType; expected \(images, labels\)"),
        ("photos", r"^train is of type str; expected"),
        (Endless(), r"^train is of type Endless, which has no __getitem__ and __len__; expected"),
        (DataLoader(Endless()), r"^train is of type Endless, which has no __getitem__ and __len__; expected"),
        (
            DataLoader(TensorDataset(COLOURED, LABELS), sampler=SubsetRandomSampler([0, 1])),
            r"^train: the DataLoader's SubsetRandomSampler chooses samples, .*as a torch.utils.data.Subset$",
        ),
        ((["a.jpg"], [0]), r"^train: images are of type list; expected"),
        (
            (COLOURED.float(), LABELS),
            r"^train: images are torch.float32 \[6, 3, 10, 12\], labels \[6\]; expected uint8",
        ),
        (
            (COLOURED.numpy() / 255, LABELS),
            r"^train: images are float64 \[6, 3, 10, 12\], labels \[6\]; expected uint8",
        ),
        ((COLOURED, LABELS[:5]), r"labels \[5\]; expected uint8 \[N, C, H, W\], .* and \[N\]$"),
        ((COLOURED, LABELS - 1), r"^train: there is a label -1; expected integers from 0$"),
        ((COLOURED, np.full(6, 2**63, np.uint64)), r"^train: there is a label .*; expected integers from 0$"),
        ((COLOURED, np.full(6, 2**64 - 1, np.uint64)), r"^train: there is a label .*; expected integers from 0$"),
        ((COLOURED, [2**70] * 6), r"^train: labels are no integers"),
        ((COLOURED, np.full(6, 10**12)), r"^train: there is a label 1000000000000; labels number the classes from 0"),
        ((COLOURED, np.full(6, np.nan)), r"^train: there is a label nan; expected integers from 0$"),
        ((COLOURED, np.full(6, 1j)), r"^train: labels are torch.complex128; expected one integer"),
        ((COLOURED, LABELS + 0.5), r"^train: there is a label 2.5; expected integers from 0$"),
        (
            (COLOURED, ["cat"] * 6),
            r"^train: labels are no integers \(.*\); expected one integer from 0 for each image$",
        ),
        (Items([], []), r"^train: Items is empty; it must have an item at least$"),
        (
            Items(list(COLOURED / 255)),
            r"^train: item 0 of Items has an image torch.float32 .*leave out ToTensor and Nor",
        ),
        (Items(["a.jpg"] * 6), r"^train: item 0 of Items has an image of type str; expected a PIL image or uint8"),
        (Items(list(COLOURED), ["cat"] * 6), r"^train: item 0 of Items has a label of type str; expected an integer$"),
        (
            Items([*pictures(GREY[:5]), Image.new("L", (9, 9))]),
            r"^train: item 5 of Items is \[1, 9, 9\], and item 0 is",
        ),
    ],
)
def test_anything_else_is_one_line_that_says_what_is_wanted(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        image_set(given)
    assert "\n" not in str(caught.value)


def test_items_that_are_no_pairs_are_named() -> None:
    items = Items(list(COLOURED))
    items.items = [{"image": image} for image in COLOURED]
    with pytest.raises(UserError, match=r"^train: item 0 of Items is of type dict; expected \(image, label\)$"):
        image_set(items)
