"""Corruptions of bytes, JSON documents and arrays.  All randomness comes from the given generator."""

import json
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
MAX_ADDED_BYTES = 1 << 16  # by one mutation


def mutate(content: bytes, rng: Random, other: bytes = b"") -> bytes:
    """Apply one to four mutations.  `other` is a file to splice with."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = rng.choice(MUTATIONS)(content, rng) if content else insert(content, rng)
    if other and rng.random() < 0.05:
        return content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other)) :]
    return content


def span(content: bytes, rng: Random, longest: int = 256) -> tuple[int, int]:
    begin = rng.randrange(len(content))
    return begin, min(len(content), begin + rng.randint(1, longest))


def flip_bit(content: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def flip_bit_near_start(content: bytes, rng: Random) -> bytes:
    """Flip a bit near the start, in the headers."""
    head = rng.choice((16, 64, 512))
    return flip_bit(content[:head], rng) + content[head:]


def overwrite_number(content: bytes, rng: Random) -> bytes:
    """Write an extreme number, with a width and byte order that formats use."""
    width = rng.choice(list(WIDTHS))
    highest = (1 << (8 * width)) - 1
    value = rng.choice((0, 1, highest, highest >> 1, (highest >> 1) + 1, highest - 1, rng.randint(0, highest)))
    at = rng.randrange(len(content))
    return content[:at] + struct.pack(rng.choice("<>") + WIDTHS[width], value) + content[at + width :]


def truncate(content: bytes, rng: Random) -> bytes:
    return content[: rng.randrange(len(content))]


def delete(content: bytes, rng: Random) -> bytes:
    begin, end = span(content, rng)
    return content[:begin] + content[end:]


def insert(content: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 2, 16, 600))) + content[at:]


def repeat(content: bytes, rng: Random) -> bytes:
    begin, end = span(content, rng, 64)
    count = rng.choice((2, 100, MAX_ADDED_BYTES // (end - begin)))
    return content[:begin] + content[begin:end] * count + content[end:]


def blank(content: bytes, rng: Random) -> bytes:
    begin, end = span(content, rng, 4096)
    return content[:begin] + rng.choice((b"\0", b"\xff", b" ")) * (end - begin) + content[end:]


def swap(content: bytes, rng: Random) -> bytes:
    first, second, third = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    return content[:first] + content[second:third] + content[first:second] + content[third:]


def replace_character(content: bytes, rng: Random) -> bytes:
    """Replace a byte by a character with a meaning in text formats."""
    at = rng.randrange(len(content))
    return content[:at] + bytes([rng.choice(b"0123456789.-+eE\"'[]{}(),:=#\\/\n\0 ")]) + content[at + 1 :]


MUTATIONS: tuple[Callable[[bytes, Random], bytes], ...] = (
    flip_bit,
    flip_bit_near_start,
    overwrite_number,
    overwrite_number,
    truncate,
    delete,
    insert,
    repeat,
    blank,
    swap,
    replace_character,
)


def zeros_deflated(count: int) -> bytes:
    """Return raw deflate data of about `count` zeros, 1000 times smaller, quickly: one repeated block."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (count >> 20) + packer.flush()


DEEP = "@deep@"  # replaced by nested brackets, deeper than any stack
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


def corrupt_json(document: bytes, rng: Random) -> bytes:
    """Replace one to three values, keys or rows of a document, which stays valid JSON."""
    tree = json.loads(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = corrupt_tree(tree, rng)
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    return text.replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).encode("utf-8", "surrogatepass")


def corrupt_tree(tree: Any, rng: Random) -> Any:
    """Descend at random and change a value."""
    is_inside = isinstance(tree, dict | list) and tree and rng.random() < 0.9
    if not is_inside:
        return nonsense(rng)
    place = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    what = rng.random()
    if what < 0.75:
        tree[place] = corrupt_tree(tree[place], rng)
    elif what < 0.9:
        removed = tree.pop(place)
        if isinstance(tree, dict) and rng.random() < 0.3:
            tree[str(nonsense(rng))] = removed
    elif isinstance(tree, list):
        tree += [tree[place]] * rng.choice((1, 1, 1000))
    else:
        tree[str(nonsense(rng))] = nonsense(rng)
    return tree


def corrupt_array(array: NDArray[Any], rng: Random) -> NDArray[Any]:
    """Change the dtype, shape or a value."""
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
