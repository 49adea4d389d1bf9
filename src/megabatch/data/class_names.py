"""What a class may be called, and which numbers label it, wherever they were read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.shapes import MOST_CLASSES
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
