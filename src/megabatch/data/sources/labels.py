"""What a class may be called, and which numbers label it, wherever they were read."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.sources.shapes import MOST_CLASSES
from megabatch.errors import UserError
from megabatch.text import is_plain

LONGEST_NAME = 1_000  # letters; a folder's has 255 at most


def class_names_of(names: NDArray[Any], where: str) -> tuple[str, ...]:
    """The texts of an array."""
    if names.dtype.kind in "iu":
        names = names.astype(str)
    if names.ndim != 1 or names.dtype.kind != "U" or len(names) > MOST_CLASSES:
        raise UserError(
            f"{where}: class_names is {names.dtype} of shape {names.shape}; expected at most {MOST_CLASSES:,} texts in "
            "one dimension, such as numpy.array(['cat', 'dog'])"
        )
    return require_names(names.tolist(), where)


def require_names(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Plain, and no two the same: sources are joined, and classes reported, by name."""
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name or len(name) > LONGEST_NAME or not is_plain(name):
            raise UserError(
                f"{where}: class {number} is called {name!r}; expected plain text of 1 to {LONGEST_NAME:,} letters "
                "without controls; rename it"
            )
        if first.setdefault(name, number) != number:
            raise UserError(f"{where}: classes {first[name]} and {number} are both called {name!r}; rename one of them")
    return tuple(names)


def labels_of(labels: NDArray[Any], count: int, where: str) -> NDArray[np.int64]:
    """Of so many images, looked at before they are cast: 2^64-1 would become -1."""
    if labels.shape != (count,) or labels.dtype.kind not in "iu" or not count:
        raise UserError(
            f"{where} is {labels.dtype} of shape {labels.shape} for {count} images; "
            "expected one integer from 0 for each"
        )
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= MOST_CLASSES:
        raise UserError(
            f"{where} has a label {lowest if lowest < 0 else highest}; labels number the classes from 0 to "
            f"{MOST_CLASSES - 1}"
        )
    return labels.astype(np.int64)


# Names of splits: folders and shards of training, validation and test images, and classes that look like them.
#
# The words are those of Hugging Face's imagefolder.  torchvision and ImageNet write val, fastai and Roboflow valid,
# and sets of Kaggle's Train, training_set or test_set.

TRAIN_WORDS = ("train", "training")
# Test images count only if there are no validation images: ImageNet's test/ has no labels.
TEST_WORDS = (("val", "valid", "validation", "dev"), ("test", "testing", "eval", "evaluation"))
ALL_TEST_WORDS = tuple(word for words in TEST_WORDS for word in words)
LAYOUT = "CLASS/IMAGE, or train/CLASS/IMAGE and val/CLASS/IMAGE"
MOST_NAMED = 3


def is_split(name: str, words: Sequence[str]) -> bool:
    """Whether it is one of the words, in upper or lower case, also as in training_set or testset."""
    return re.sub(r"[-_ ]?set$", "", name.lower()) in words


def words_in(name: str) -> set[str]:
    """The words of a name such as imagenet-val-000003.tar or seg_train, without the numbers that they end with."""
    return {re.sub(r"\d+$", "", word) for word in re.split(r"[-_. ]", name.lower())}


def choose_splits(folders: Sequence[str], place: Path) -> list[str]:
    """Return the folder of the training images and, if there is one, that of the test images; [] if all are classes."""
    train = sorted(name for name in folders if is_split(name, TRAIN_WORDS))
    test: list[str] = []
    for words in TEST_WORDS:
        test = test or sorted(name for name in folders if is_split(name, words))
    if not train or not (test or len(train) == len(folders)):
        return []
    for found, purpose in ((train, "train"), (test, "test")):
        if len(found) > 1:
            raise UserError(
                f"{place} has {found[0]}/ and {found[1]}/ to {purpose} on, and only one can be used; "
                "rename or remove the other"
            )
    return [*train, *test]


def are_splits(folders: Sequence[str]) -> bool:
    """Whether `choose_splits` can return them."""
    words = (TRAIN_WORDS, ALL_TEST_WORDS)
    return 1 <= len(folders) <= 2 and all(map(is_split, folders, words))


def warn_of_names(names: Sequence[str], place: str, remedy: str = "check its labels") -> tuple[str, ...]:
    """Return a line if there is a single class, or classes are named like splits: most likely, that is a mistake."""
    if len(names) == 1:
        return (f"{place} has one class, {names[0]!r}, so top-1 will be 1.0; {remedy}",)
    suspects = named_like_splits(names)
    if not suspects:
        return ()
    more = f" and {len(suspects) - MOST_NAMED:,} more" if len(suspects) > MOST_NAMED else ""
    return (
        f"{place} has classes named like splits: {', '.join(suspects[:MOST_NAMED])}{more}; "
        "if they are not classes, rename the folders to train and val",
    )


def named_like_splits(names: Sequence[str]) -> list[str]:
    """Names such as valid; names such as seg_train only beside one such as seg_test, for a train_station is a class."""
    by_word = [[name for name in names if words_in(name) & {*words}] for words in (TRAIN_WORDS, ALL_TEST_WORDS)]
    if all(by_word):
        return sorted({*by_word[0], *by_word[1]})
    return [name for name in names if is_split(name, (*TRAIN_WORDS, *ALL_TEST_WORDS))]
