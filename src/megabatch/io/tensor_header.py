"""The header of a safetensors file, checked before any tensor is used.

Format: 8 bytes (the header's length), JSON ({name: {dtype, shape, data_offsets}, "__metadata__": {...}}), tensors.

The tensors must be contiguous and fill the file, as the reader of safetensors requires.  So they cannot overlap, and
they need no more memory than the file has bytes.  In addition, names must be unique, since readers differ in which
duplicate they use, and sizes must be within the limits of torch.
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
MAX_HEADER_BYTES = 32 << 20  # a tensor usually takes 100 bytes
MAX_DIMENSIONS = 32
WIDTHS = {  # bytes per element
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
    """Error for a file that is not a valid safetensors file; the message states the reason."""


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Size], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Size, Size]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class SafetensorsHeader(NamedTuple):
    tensors: dict[str, Entry]
    metadata: dict[str, str]
    data_begin: int  # in the file


def read_header(path: Path) -> SafetensorsHeader:
    """Read only the header of a file."""
    with reading(path) as file:
        return parse_header(file, os.fstat(file.fileno()).st_size)


def parse_header(file: BinaryIO, file_bytes: int) -> SafetensorsHeader:
    """Read and check the header at the start of `file`, which has `file_bytes` bytes.  Raises NotTensors."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if file_bytes < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise NotTensors(f"its header of {length:,} bytes does not fit a file of {file_bytes:,} bytes")
    try:
        tables = json.loads(file.read(length).decode(), object_pairs_hook=unique_names)
        if not isinstance(tables, dict):
            raise NotTensors("it is not a JSON object")
        metadata = msgspec.convert(tables.pop(METADATA, {}), dict[str, str])
        tensors = msgspec.convert(tables, dict[str, Entry])
    except RecursionError:
        raise NotTensors("its header is nested too deeply") from None
    except ValueError as error:  # from json, msgspec or NotTensors
        raise NotTensors(f"its header is damaged: {error}") from None
    require_contiguous(tensors, file_bytes - LENGTH_BYTES - length)
    return SafetensorsHeader(tensors, metadata, LENGTH_BYTES + length)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise NotTensors("a name occurs twice")
    return table


def require_contiguous(tensors: dict[str, Entry], data_bytes: int) -> None:
    """Check that the tensors have the sizes of their shapes and follow one another up to the end of the file."""
    previous_end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in WIDTHS:
            raise NotTensors(f"{name} has the unknown dtype {entry.dtype}")
        if begin != previous_end or end - begin != math.prod(entry.shape) * WIDTHS[entry.dtype]:
            raise NotTensors(f"{name} ({entry}) does not fit bytes {begin:,} to {end:,} after the previous tensor")
        previous_end = end
    if previous_end != data_bytes:
        raise NotTensors(f"its tensors have {previous_end:,} bytes, but the file has {data_bytes:,} for them")
