"""The same images give the same data set, from arrays, tensors, Datasets and DataLoaders."""

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
    """A Dataset as users write it."""

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


def test_ambiguous_shapes_have_channels_first() -> None:
    images = torch.zeros(2, 3, 9, 3, dtype=torch.uint8)
    assert image_set((images, [0, 1])).read(np.arange(1)).shape == (1, 3, 9, 3)


def test_a_read_only_array_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    pixels = COLOURED.numpy().copy()
    pixels.flags.writeable = False
    assert torch.equal(image_set((pixels, LABELS)).read(np.arange(6)), COLOURED) and not recwarn.list


@pytest.mark.parametrize("targets", [LABELS, LABELS.tolist(), LABELS.numpy()])
def test_listed_labels_are_not_read_item_by_item(targets: Any) -> None:
    items = WithTargets(pictures(GREY), targets)
    assert torch.equal(image_set(items).labels, LABELS)
    assert image_set(Subset(items, [5, 1, 2])).labels.tolist() == [2, 0, 1]
    many = WithTargets([], [])
    many.items, many.targets = [(COLOURED[0], number % 5) for number in range(1000)], [at % 5 for at in range(1000)]
    assert image_set(many).labels.tolist() == many.targets and many.reads < 20


def test_listed_labels_that_differ_from_the_items_are_ignored() -> None:
    wrong = WithTargets(list(COLOURED), [label + 1 for label in LABELS.tolist()])
    assert torch.equal(image_set(wrong).labels, LABELS)
    changed = WithTargets(list(COLOURED), LABELS)
    changed.target_transform = int  # type: ignore[assignment]
    changed.items = [(image, 1) for image, _ in changed.items]
    assert image_set(changed).labels.tolist() == [1] * 6


def test_a_message_lists_the_ignored_parts_of_a_data_loader() -> None:
    messages: list[str] = []
    as_image_set(DataLoader(Items(pictures(GREY)), num_workers=2), "test", messages.append)
    assert len(messages) == 1 and messages[0].startswith("test: only the dataset of the DataLoader is used")


def test_reading_a_large_dataset_for_its_labels_is_reported() -> None:
    messages: list[str] = []
    many = Items([COLOURED[0]] * 10_000, [1] * 10_000)
    assert len(as_image_set(many, "train", messages.append)) == 10_000
    assert len(messages) == 1 and messages[0].startswith("train: reading all 10,000 items of Items for their labels")


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
            r"^train: the DataLoader's SubsetRandomSampler chooses samples, .*torch.utils.data.Subset$",
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
        ((COLOURED, LABELS[:5]), r"labels \[5\]; expected uint8 \[N, C, H, W\], .* and \[N\] or \[N, classes\]$"),
        ((COLOURED, LABELS - 1), r"^train has a label -1; expected .*integer"),
        ((COLOURED, np.full(6, 2**63, np.uint64)), r"^train has a label .*; expected .*integer"),
        ((COLOURED, np.full(6, 2**64 - 1, np.uint64)), r"^train has a label .*; expected .*integer"),
        ((COLOURED, [2**70] * 6), r"^train: labels are not integers"),
        ((COLOURED, np.full(6, 10**12)), r"^train has a label 1000000000000; labels .* from 0"),
        ((COLOURED, np.full(6, np.nan)), r"^train has a label nan; expected .*integer"),
        ((COLOURED, np.full(6, 1j)), r"^train: labels are torch.complex128; expected one .*integer"),
        ((COLOURED, LABELS + 0.5), r"^train has a label 2.5; expected .*integer"),
        (
            (COLOURED, ["cat"] * 6),
            r"^train: labels are not integers \(.*\); expected one .*integer",
        ),
        (Items([], []), r"^train: Items is empty; .*at least one item$"),
        (
            Items(list(COLOURED / 255)),
            r"^train: item 0 of Items has an image torch.float32 .*remove ToTensor and Nor",
        ),
        (Items(["a.jpg"] * 6), r"^train: item 0 of Items has an image of type str; expected a PIL image or uint8"),
        (Items(list(COLOURED), ["cat"] * 6), r"^train: item 0 of Items has a label of type str; expected an integer$"),
        (
            Items([*pictures(GREY[:5]), Image.new("L", (9, 9))]),
            r"^train: item 5 of Items is \[1, 9, 9\], but item 0 is",
        ),
    ],
)
def test_other_objects_are_refused_in_one_line(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        image_set(given)
    assert "\n" not in str(caught.value)


def test_items_that_are_not_pairs_are_refused() -> None:
    items = Items(list(COLOURED))
    items.items = [{"image": image} for image in COLOURED]
    with pytest.raises(UserError, match=r"^train: item 0 of Items .*dict; expected \(image, label\)$"):
        image_set(items)
