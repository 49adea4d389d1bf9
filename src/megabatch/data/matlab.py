"""Struct arrays of MATLAB's .mat files of version 5, as ImageNet's devkit has one: texts and numbers of their fields.

A file is a header of 128 bytes and elements: a type and a number of bytes (uint32 each, or uint16 each where up to four
bytes follow in their place), the bytes, and padding to 8.  A compressed element holds another one.  A matrix is made of
elements: flags (whose first byte is its class), dims, a name, and its values; a struct array's are the length and the
list of its field names, and a matrix for every field of every struct.  Numbers are stored in the smallest type that
holds them.  (MAT-File Format, MathWorks; level 5.)

scipy.io.loadmat does not do: of 800 damaged files it ended the process on 4 (scipy 1.17), and it allocates whatever
dims ask for.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

HEADER_BYTES, LITTLE_ENDIAN = 128, b"IM"
MATRIX, COMPRESSED = 14, 15
DTYPES = {
    1: "<i1",
    2: "<u1",
    3: "<i2",
    4: "<u2",
    5: "<i4",
    6: "<u4",
    7: "<f4",
    9: "<f8",
    12: "<i8",
    13: "<u8",
    16: "<u1",  # UTF-8
    17: "<u2",  # UTF-16
}
MOST_BYTES = 64_000_000  # of what is compressed
MOST_DEPTH = 8
CELL, STRUCT, TEXT = 1, 2, 4  # classes; from 6 on they are numbers


class Element(NamedTuple):
    kind: int
    content: bytes

    def numbers(self) -> list[Any]:
        values: list[Any] = np.frombuffer(self.content, DTYPES[self.kind]).tolist()
        return values


def read_structs(content: bytes, name: str) -> list[dict[str, Any]]:
    """The variable `name`, as a dict for every struct of it.  ValueError where it is not there."""
    if content[126:128] != LITTLE_ENDIAN:
        raise ValueError("it is no .mat file of version 5")
    try:
        for element in elements(content[HEADER_BYTES:]):
            if element.kind == COMPRESSED:
                element = next(elements(decompress(element.content)))
            if element.kind == MATRIX:
                _, _, called, *_ = elements(element.content)
                if called.content.decode("latin-1") == name:
                    value = parse_matrix(element.content)
                    if isinstance(value, list) and all(isinstance(member, dict) for member in value):
                        return value
    except (struct.error, zlib.error, KeyError, StopIteration, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"it is damaged ({error!r})") from error
    raise ValueError(f"it has no struct array {name!r}")


def decompress(content: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    plain = decompressor.decompress(content, MOST_BYTES)
    if decompressor.unconsumed_tail:
        raise ValueError(f"it holds more than {MOST_BYTES:,} bytes")
    return plain


def elements(content: bytes) -> Iterator[Element]:
    at = 0
    while at + 8 <= len(content):
        small_kind, small_length = struct.unpack_from("<HH", content, at)
        if small_length:
            yield Element(small_kind, content[at + 4 : at + 4 + small_length])
            at += 8
            continue
        kind, length = struct.unpack_from("<II", content, at)
        yield Element(kind, content[at + 8 : at + 8 + length])
        # What is compressed is not padded.
        at += 8 + (length if kind == COMPRESSED else -(-length // 8) * 8)


def parse_matrix(content: bytes, depth: int = 0) -> Any:
    """A text, a list of numbers, or a list of structs; None for what is neither."""
    if not content:
        return None
    if depth > MOST_DEPTH:
        raise ValueError(f"it has structs inside of structs, more than {MOST_DEPTH} deep")
    flags, dims, _, *values = elements(content)
    matrix_class, count = flags.content[0], math.prod(dims.numbers())
    if matrix_class == STRUCT:
        width = values[0].numbers()[0]
        names = [
            values[1].content[begin : begin + width].partition(b"\0")[0].decode("latin-1")
            for begin in range(0, len(values[1].content), width)
        ]
        members = values[2:]
        if not names or count * len(names) != len(members):
            raise ValueError(f"it is damaged: {len(members)} members are not {len(names)} for each of {count} structs")
        return [
            {
                field: parse_matrix(member.content, depth + 1)
                for field, member in zip(names, members[at * len(names) : (at + 1) * len(names)], strict=True)
            }
            for at in range(count)
        ]
    if matrix_class == TEXT:
        return "".join(map(chr, values[0].numbers())) if values else ""
    return values[0].numbers() if matrix_class != CELL and values else None
