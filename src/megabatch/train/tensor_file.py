"""Safetensors files, written and read in one pass each, with the checksum from the same pass.

The bytes are those of safetensors' own writer, whose file would have to be read again to be hashed.  Python's lock is
held for moments only: training goes on meanwhile.
"""

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from megabatch.disk import fill_hashed, write_hashed
from megabatch.regular_files import reading
from megabatch.runs.tensor_header import LENGTH_BYTES, MAX_HEADER_BYTES, Entry, Header, parse_header

# The wider come first in a file, and of equally wide ones the later in this table: so each tensor is aligned.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ORDER = {dtype: place for place, dtype in enumerate(DTYPES.values())}
AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # what numpy knows, by bytes
ALIGNED_BYTES = 8


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """The sha256 of the file.  Tensors may share memory, and be strided; those of a device are copied one by one."""
    names = sorted(tensors, key=lambda name: (-ORDER[tensors[name].dtype], name))
    return write_hashed(path, parts(names, tensors, metadata))


def parts(names: list[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNED_BYTES)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield bytes_of(tensors[name])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """In the order of its indices.  By numpy, which takes no threads from those that compute."""
    integers = tensor.detach().cpu().view(AS_INTEGERS[tensor.dtype.itemsize]).numpy()
    return np.ascontiguousarray(integers).reshape(-1).view(np.uint8).data


def read_flat(path: Path, check: Callable[[Header], None] | None = None) -> tuple[torch.Tensor, str]:
    """The file's bytes, and their sha256.  What `check` says of its header is raised before memory is taken."""
    with reading(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if check:
            check(parse_header(file, file_bytes))
            file.seek(0)
        flat = np.empty(file_bytes, dtype=np.uint8)
        return torch.from_numpy(flat), fill_hashed(file, flat.data)


def header_of(flat: torch.Tensor) -> Header:
    length = int.from_bytes(flat[:LENGTH_BYTES].numpy().tobytes(), "little")
    begin = flat[: LENGTH_BYTES + min(length, MAX_HEADER_BYTES)].numpy()  # a copy of no more than it needs
    return parse_header(io.BytesIO(begin.data), len(flat))


def tensors_in(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """They share its memory.  `NotTensors` if it is no file of them."""
    header = header_of(flat)
    data = flat[header.data_begin :]
    return {name: tensor_in(data, entry) for name, entry in header.tensors.items()}


def tensor_in(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    part, dtype = data[slice(*entry.data_offsets)], DTYPES[entry.dtype]
    if part.storage_offset() % dtype.itemsize:  # not as we write them, and a view would be refused
        part = part.clone()
    return part.view(dtype).view(entry.shape)
