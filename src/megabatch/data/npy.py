"""Arrays as numpy's .npy has them, read without numpy's parser: that evaluates the header as Python, and hostile ones
end in a dozen kinds of errors, of the tokenizer and of the interpreter among them.

A header is a magic of 6 bytes, a version of 2, its length (uint16, from version 2.0 on uint32), and the text
{'descr': '<i8', 'fortran_order': False, 'shape': (3, 4), }, padded with spaces; then the values.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"\x93NUMPY"
LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
LONGEST_HEADER = 10_000  # numpy's own limit
MOST_DIMS = 32
MOST_BYTES = 1 << 48
LAST_LETTER = 0x10FFFF  # of Unicode
CHUNK_BYTES = 1 << 20
# Truth values, integers, floats, texts and bytes: no objects, which would be pickles, nothing made of fields, no dates.
HEADER = re.compile(
    r"""\{\s*(?:
        (?:'descr'\s*:\s*'(?P<descr>[<>|=]?(?:b1|[iu][1248]|f[248]|[US][1-9][0-9]{0,6}))'
         | 'fortran_order'\s*:\s*(?P<order>True|False)
         | 'shape'\s*:\s*\(\s*(?P<shape>(?:[0-9]{1,18}L?\s*,\s*)*(?:[0-9]{1,18}L?\s*)?)\)
        )\s*(?:,\s*|(?=\}))
    ){3}\}\s*""",
    re.VERBOSE | re.ASCII,
)

Read = Callable[[int], bytes]  # as many bytes, or all that are left


class NotArrays(ValueError):
    """What is no file of arrays; the text says why."""


class Header(NamedTuple):
    dtype: np.dtype[Any]
    is_fortran: bool
    shape: tuple[int, ...]
    length: int  # of the header itself

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_array(read: Read, size: int) -> NDArray[Any]:
    """The array in the `size` bytes that `read` gives one after another.  Its memory is taken once they fit it."""
    header = read_header(read)
    if header.length + header.num_bytes != size:
        raise NotArrays(f"{header.dtype} of shape {header.shape} has {header.num_bytes:,} bytes, and others are there")
    content = np.empty(header.num_bytes, np.uint8)
    filled = 0
    while filled < len(content):
        chunk = read(min(CHUNK_BYTES, len(content) - filled))
        if not chunk:
            raise NotArrays(f"it ends after {filled:,} of {len(content):,} bytes")
        content[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
        filled += len(chunk)
    require_letters(content, header.dtype)
    values: NDArray[Any] = content.view(header.dtype)
    return values.reshape(header.shape[::-1]).T if header.is_fortran else values.reshape(header.shape)


def read_header(read: Read) -> Header:
    begin = read(len(MAGIC) + 2)
    version = tuple(begin[len(MAGIC) :])
    if begin[: len(MAGIC)] != MAGIC or version not in LENGTH_BYTES:
        raise NotArrays("a member is no .npy of version 1, 2 or 3")
    width = LENGTH_BYTES[version]
    length = int.from_bytes(read(width), "little")
    if length > LONGEST_HEADER:
        raise NotArrays(f"an array's header of {length:,} bytes is longer than {LONGEST_HEADER:,}")
    header = parse_header(read(length).decode("latin-1"), len(begin) + width + length)
    if max(len(header.shape), 1) > MOST_DIMS or math.prod(filter(None, header.shape)) > MOST_BYTES:
        raise NotArrays(f"an array's shape has {len(header.shape)} dimensions or too many values")
    return header


def parse_header(text: str, length: int) -> Header:
    found = HEADER.fullmatch(text)
    if not found or None in (parts := found.group("descr", "order", "shape")):
        raise NotArrays(f"an array's header is not that of numbers or texts: {text[:120].rstrip()!r}")
    descr, order, shape = parts
    sizes = tuple(int(size.strip().rstrip("L")) for size in shape.split(",") if size.strip())
    if len(sizes) == 1 and "," not in shape:  # (3) is no tuple
        raise NotArrays(f"an array's shape ({shape}) is none")
    return Header(np.dtype(descr), order == "True", sizes, length)


def require_letters(content: NDArray[np.uint8], dtype: np.dtype[Any]) -> None:
    """Numbers that are no letters would end in a SystemError once they are looked at."""
    if dtype.kind == "U" and len(content):
        letters = content.view(np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if letters.max() > LAST_LETTER:
            raise NotArrays("a text has letters that are none")
