"""Values that no writer of ours writes, and the same in the place of some value of a JSON document or an array."""

import json
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEEP = "@deep@"  # stands for brackets inside brackets, deeper than any stack
DEPTH = 100_000
TEXTS = (
    "",
    "x",
    "..",
    "/",
    "a/../../b",
    "\x1b[31mred\x1b[0m",
    "two\nlines",
    "\0",
    "[bold]x[/bold]",
    "\u202e",
    "9" * 5000,
)
NUMBERS = (-1, 0, 1, 2, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64 - 1, 10**30, 1e-320, 1e308, -1e308, 0.5)
OTHERS: tuple[Any, ...] = (True, False, None, [], {}, [[]], {"": ""}, DEEP, float("nan"), float("inf"))


def nonsense(rng: Random) -> Any:
    return rng.choice(rng.choice((TEXTS, NUMBERS, OTHERS)))


def lie_in_json(document: bytes, rng: Random) -> bytes:
    """The document with one value, key or row of it wrong, and still JSON."""
    tree = json.loads(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = lie_in_tree(tree, rng)
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    return text.replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).encode("utf-8", "surrogatepass")


def lie_in_tree(tree: Any, rng: Random) -> Any:
    """Goes down at random, and changes what it comes to."""
    is_inside = isinstance(tree, dict | list) and tree and rng.random() < 0.9
    if not is_inside:
        return nonsense(rng)
    place = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    what = rng.random()
    if what < 0.75:
        tree[place] = lie_in_tree(tree[place], rng)
    elif what < 0.9:
        removed = tree.pop(place)
        if isinstance(tree, dict) and rng.random() < 0.3:
            tree[str(nonsense(rng))] = removed
    elif isinstance(tree, list):
        tree += [tree[place]] * rng.choice((1, 1, 1000))
    else:
        tree[str(nonsense(rng))] = nonsense(rng)
    return tree


def lie_in_array(array: NDArray[Any], rng: Random) -> NDArray[Any]:
    """Another dtype, shape or value."""
    what = rng.randrange(5)
    if what == 0:
        text = np.array(str(nonsense(rng)))
        return text if rng.random() < 0.5 else np.char.encode(text, "utf-8")
    if what == 1:
        with np.errstate(all="ignore"):
            dtype = rng.choice(("i1", "u8", "i8", "f4", "f8", ">i4", "?", "c16", "m8[s]"))
            return array.astype(dtype) if array.dtype.kind in "iufb" else np.char.encode(array.astype("U"), "utf-8")
    if what == 2:
        return array.reshape(rng.choice(((-1,), (1, -1), (-1, 1), (1, -1, 1))))
    if what == 3:
        return array[: rng.randrange(max(1, len(array)))] if array.ndim else array[None]
    return with_value(array, rng)


def with_value(array: NDArray[Any], rng: Random) -> NDArray[Any]:
    if array.dtype.kind == "U":
        return np.array([*map(str, array.ravel()[1:]), rng.choice(TEXTS)])
    if array.dtype.kind not in "iu" or not array.size:
        return array.astype(np.uint64) if array.dtype.kind in "iufb" else array
    wide = array.astype(rng.choice((np.int64, np.uint64)))
    limits = np.iinfo(wide.dtype)
    wide.flat[rng.randrange(wide.size)] = rng.choice((limits.min, limits.max, 2**63 - 1, 2**31, 10**6, 0))
    return wide
