"""The header of a safetensors file, checked before a byte of its tensors is used.

8 bytes (the header's length), JSON ({name: {dtype, shape, data_offsets}, "__metadata__": {...}}), the tensors' bytes.

The bytes of all tensors lie one after another and fill the file, as safetensors' own reader demands: none overlap, and
nobody needs more memory than the file has bytes.  Beyond what that reader refuses, no name may be there twice, since
readers differ in which one they take, and no size may be more than torch can count.
"""

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta, Struct

from megabatch.io.reading import reading

METADATA = "__metadata__"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20  # 100 bytes a tensor, as a rule
MAX_DIMENSIONS = 32
WIDTHS = {  # bytes of an element
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
Size = Annotated[int, Meta(ge=0, le=2**48)]


class NotTensors(ValueError):
    """What is no safetensors file, and why."""


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Size, Size]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Header(NamedTuple):
    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data_begin: int  # in the file


def read_header(path: Path) -> Header:
    """Of a file, of which no more is read."""
    with reading(path) as file:
        return parse_header(file, os.fstat(file.fileno()).st_size)


def parse_header(file: BinaryIO, file_bytes: int) -> Header:
    """Of what begins with one."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if file_bytes < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise NotTensors(f"its header would have {length:,} bytes, in a file of {file_bytes:,}")
    try:
        tables = json.loads(file.read(length).decode(), object_pairs_hook=without_repetition)
        if not isinstance(tables, dict):
            raise NotTensors("its header is no table of tensors")
        metadata = msgspec.convert(tables.pop(METADATA, {}), dict[str, str])
        tensors = msgspec.convert(tables, dict[str, Entry])
    except RecursionError:
        raise NotTensors("its header is nested too deeply") from None
    except ValueError as error:  # of json, of msgspec, and ours
        raise NotTensors(f"its header is damaged: {error}") from None
    require_filled(tensors, file_bytes - LENGTH_BYTES - length)
    return Header(tensors, metadata, LENGTH_BYTES + length)


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise NotTensors("a name is there twice")
    return table


def require_filled(tensors: dict[str, Entry], data_bytes: int) -> None:
    """Each tensor has its bytes, from where the one before it ends."""
    before = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in WIDTHS:
            raise NotTensors(f"{name} is of the unknown dtype {entry.dtype}")
        if begin != before or end - begin != math.prod(entry.shape) * WIDTHS[entry.dtype]:
            raise NotTensors(f"{name}, {entry}, does not lie in bytes {begin:,} to {end:,}, after those of the others")
        before = end
    if before != data_bytes:
        raise NotTensors(f"its tensors have {before:,} bytes, and the file has {data_bytes:,} for them")
