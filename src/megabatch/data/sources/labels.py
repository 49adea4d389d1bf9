"""Checks of class names and labels, and recognition of split names (train, val, ...).

The words for splits are those of Hugging Face's imagefolder.  torchvision and ImageNet write val, fastai and Roboflow
valid, and data sets on Kaggle Train, training_set or test_set.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.shapes import MOST_CLASSES
from megabatch.errors import UserError
from megabatch.text import is_plain, listed

MAX_NAME_LENGTH = 1_000  # characters; the name of a folder has at most 255
TRAIN_WORDS = ("train", "training")
# Test images are used only if there are no validation images: ImageNet's test/ has no labels.
TEST_WORDS = (("val", "valid", "validation", "dev"), ("test", "testing", "eval", "evaluation"))
ALL_TEST_WORDS = tuple(word for words in TEST_WORDS for word in words)
LAYOUT = "CLASS/IMAGE, or train/CLASS/IMAGE and val/CLASS/IMAGE"
MAX_LISTED = 3
SEPARATOR = ";"  # between the labels of an image
MOST_MARKS = 1 << 28  # bytes of the table of label sets


def parse_class_names(names: NDArray[Any], where: str) -> tuple[str, ...]:
    """Return the class names in an array of texts or integers."""
    if names.dtype.kind in "iu":
        names = names.astype(str)
    if names.ndim != 1 or names.dtype.kind != "U" or len(names) > MOST_CLASSES:
        raise UserError(
            f"{where}: class_names is {names.dtype} of shape {names.shape}; expected a one-dimensional array of at "
            f"most {MOST_CLASSES:,} strings, such as numpy.array(['cat', 'dog'])"
        )
    return require_names(names.tolist(), where)


def require_names(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Check that the names are plain text and distinct: sources are joined, and classes reported, by name."""
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name or len(name) > MAX_NAME_LENGTH or not is_plain(name):
            raise UserError(
                f"{where}: class {number} is named {name!r}; expected 1 to {MAX_NAME_LENGTH:,} characters without "
                "control characters; rename it"
            )
        if first.setdefault(name, number) != number:
            raise UserError(f"{where}: classes {first[name]} and {number} are both named {name!r}; rename one of them")
    return tuple(names)


def parse_labels(labels: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """Return the labels of `count` images as int64.  They are checked before the cast: 2^64-1 would become -1."""
    if labels.shape != (count,) or labels.dtype.kind not in "iu" or not count:
        raise UserError(
            f"{where} is {labels.dtype} of shape {labels.shape} for {count} images; "
            "expected one non-negative integer per image"
        )
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= MOST_CLASSES:
        raise UserError(
            f"{where} has a label {lowest if lowest < 0 else highest}; labels must be from 0 to {MOST_CLASSES - 1}"
        )
    return labels.astype(np.int64)


def number_classes(labels: Sequence[str], place: Path | str) -> tuple[list[str], NDArray[np.int64]]:
    """Return the class names and the class of each sample.  If all labels are numbers, they are the class numbers."""
    distinct = sorted(set(labels))
    if not all(re.fullmatch(r"-?[0-9]+", label) for label in distinct):
        number_of = {name: number for number, name in enumerate(distinct)}
        return distinct, np.array([number_of[label] for label in labels], np.int64)
    number_of = {label: int(label) for label in distinct}
    lowest, highest = min(number_of.values()), max(number_of.values())
    if lowest < 0 or highest >= MOST_CLASSES:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"{place} has a label {wrong}; labels must be from 0 to {MOST_CLASSES - 1}")
    return [str(number) for number in range(highest + 1)], np.array([number_of[label] for label in labels], np.int64)


def split_lists(lists: Sequence[str], place: str) -> tuple[tuple[str, ...], NDArray[np.bool_]]:
    """Return the labels in lists such as cat;dog, and a row for each list that marks its labels.

    In a multi-label source, the class of a sample is its list.  Batches, decoders and packs therefore treat it like any
    other source, and only targets and evaluation look up the labels of a list.
    """
    members = [[name.strip() for name in text.split(SEPARATOR) if name.strip()] for text in lists]
    flat = [name for names in members for name in names]
    if not flat:
        raise UserError(f"{place} has no label; write the labels of an image as cat{SEPARATOR}dog")
    names, numbers = number_classes(flat, place)
    if len(lists) * len(names) > MOST_MARKS:
        raise UserError(
            f"{place} has {len(lists):,} different lists of {len(names):,} labels; the limit is {MOST_MARKS:,} for "
            "their product; remove rare labels"
        )
    sets = np.zeros((len(lists), len(names)), np.bool_)
    sets[np.repeat(np.arange(len(lists)), [len(each) for each in members]), numbers] = True
    return tuple(names), sets


def is_split(name: str, words: Sequence[str]) -> bool:
    """Return whether a name is one of the words in any case, possibly with "set" as in training_set or testset."""
    return re.sub(r"[-_ ]?set$", "", name.lower()) in words


def words_in(name: str) -> set[str]:
    """Return the words of a name such as imagenet-val-000003.tar or seg_train, without trailing digits."""
    return {re.sub(r"\d+$", "", word) for word in re.split(r"[-_. ]", name.lower())}


def choose_splits(folders: Sequence[str], place: Path) -> list[str]:
    """Return the training folder and, if there is one, the test folder; [] if all folders are classes."""
    train = sorted(name for name in folders if is_split(name, TRAIN_WORDS))
    test: list[str] = []
    for words in TEST_WORDS:
        test = test or sorted(name for name in folders if is_split(name, words))
    if not train or not (test or len(train) == len(folders)):
        return []
    for found, purpose in ((train, "train"), (test, "test")):
        if len(found) > 1:
            raise UserError(
                f"{place} has both {found[0]}/ and {found[1]}/ to {purpose} on, but only one can be used; "
                "rename or remove the other"
            )
    return [*train, *test]


def are_splits(folders: Sequence[str]) -> bool:
    """Return whether `choose_splits` can return these folders."""
    words = (TRAIN_WORDS, ALL_TEST_WORDS)
    return 1 <= len(folders) <= 2 and all(map(is_split, folders, words))


def warn_of_names(names: Sequence[str], place: str, remedy: str = "check its labels") -> tuple[str, ...]:
    """Return a warning if there is only one class or if classes are named like splits, which is probably a mistake."""
    if len(names) == 1:
        return (f"{place} has one class, {names[0]!r}, so top-1 will be 1.0; {remedy}",)
    suspects = named_like_splits(names)
    if not suspects:
        return ()
    return (
        f"{place} has classes named like splits: {listed(suspects, MAX_LISTED)}; "
        "if they are not classes, rename the folders to train and val",
    )


def warn_of_lists(names: Sequence[str], place: str) -> tuple[str, ...]:
    """Return a warning if the name of a class looks like a list of labels."""
    lists = [name for name in names if SEPARATOR in name]
    if not lists:
        return ()
    return (
        f"{place} has classes named like lists of labels, such as {lists[0]!r}; if an image may have several labels, "
        "set data.multi_label=true and loss.name=bce",
    )


def named_like_splits(names: Sequence[str]) -> list[str]:
    """Return the names that look like splits.

    A name such as seg_train counts only if there is also one such as seg_test: train_station is a class.
    """
    by_word = [[name for name in names if words_in(name) & {*words}] for words in (TRAIN_WORDS, ALL_TEST_WORDS)]
    if all(by_word):
        return sorted({*by_word[0], *by_word[1]})
    return [name for name in names if is_split(name, (*TRAIN_WORDS, *ALL_TEST_WORDS))]
