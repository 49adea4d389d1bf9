"""Read and write .npz files without numpy's header parser, which evaluates headers as Python.

A hostile header makes that parser raise a dozen kinds of errors, even those of the tokenizer and the interpreter.

An .npy array is a magic of 6 bytes, a version of 2 bytes, the header's length (uint16, uint32 from version 2.0 on), the
header {'descr': '<i8', 'fortran_order': False, 'shape': (3, 4), } padded with spaces, and the values.
"""

import hashlib
import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megabatch.io import disk
from megabatch.io.reading import open_regular

MAGIC = b"\x93NUMPY"
LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
LONGEST_HEADER = 10_000  # bytes, as in numpy
MOST_DIMS = 32
MOST_BYTES = 1 << 48
LAST_CODE_POINT = 0x10FFFF
CHUNK_BYTES = 1 << 20
# Booleans, integers, floats, strings and bytes.  No objects, which are pickles, no structured types, no dates.
HEADER = re.compile(
    r"""\{\s*(?:
        (?:'descr'\s*:\s*'(?P<descr>[<>|=]?(?:b1|[iu][1248]|f[248]|[US][1-9][0-9]{0,6}))'
         | 'fortran_order'\s*:\s*(?P<order>True|False)
         | 'shape'\s*:\s*\(\s*(?P<shape>(?:[0-9]{1,18}L?\s*,\s*)*(?:[0-9]{1,18}L?\s*)?)\)
        )\s*(?:,\s*|(?=\}))
    ){3}\}\s*""",
    re.VERBOSE | re.ASCII,
)

Read = Callable[[int], bytes]  # returns that many bytes, or fewer at the end


class NotArrays(ValueError):
    """Error for a file that does not hold arrays; the message states the reason."""


class NpyHeader(NamedTuple):
    dtype: np.dtype[Any]
    is_fortran: bool
    shape: tuple[int, ...]
    length: int  # of the header in bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_array(read: Read, size: int) -> NDArray[Any]:
    """Read an array of `size` bytes, header included.  Memory is allocated only if the header matches `size`."""
    header = read_header(read)
    if header.length + header.num_bytes != size:
        stored = size - header.length
        raise NotArrays(f"{header.dtype} of shape {header.shape} has {header.num_bytes:,} bytes; {stored:,} are stored")
    content = np.empty(header.num_bytes, np.uint8)
    filled = 0
    while filled < len(content):
        chunk = read(min(CHUNK_BYTES, len(content) - filled))
        if not chunk:
            raise NotArrays(f"an array ends after {filled:,} of {len(content):,} bytes")
        content[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
        filled += len(chunk)
    require_code_points(content, header.dtype)
    values: NDArray[Any] = content.view(header.dtype)
    return values.reshape(header.shape[::-1]).T if header.is_fortran else values.reshape(header.shape)


def read_header(read: Read) -> NpyHeader:
    begin = read(len(MAGIC) + 2)
    version = tuple(begin[len(MAGIC) :])
    if begin[: len(MAGIC)] != MAGIC or version not in LENGTH_BYTES:
        raise NotArrays("a member is not an .npy of version 1, 2 or 3")
    width = LENGTH_BYTES[version]
    length = int.from_bytes(read(width), "little")
    if length > LONGEST_HEADER:
        raise NotArrays(f"an array's header has {length:,} bytes; the limit is {LONGEST_HEADER:,}")
    header = parse_header(read(length).decode("latin-1"), len(begin) + width + length)
    if max(len(header.shape), 1) > MOST_DIMS or math.prod(filter(None, header.shape)) > MOST_BYTES:
        raise NotArrays(f"an array's shape has {len(header.shape)} dimensions or too many values")
    return header


def parse_header(text: str, length: int) -> NpyHeader:
    found = HEADER.fullmatch(text)
    if not found or None in (parts := found.group("descr", "order", "shape")):
        raise NotArrays(f"an array does not hold numbers or strings; its header is {text[:120].rstrip()!r}")
    descr, order, shape = parts
    sizes = tuple(int(size.strip().rstrip("L")) for size in shape.split(",") if size.strip())
    if len(sizes) == 1 and "," not in shape:  # (3) is not a tuple
        raise NotArrays(f"an array's shape ({shape}) is not a tuple")
    return NpyHeader(np.dtype(descr), order == "True", sizes, length)


def require_code_points(content: NDArray[np.uint8], dtype: np.dtype[Any]) -> None:
    """Raise NotArrays for invalid code points, at which numpy raises SystemError when a string is read."""
    if dtype.kind == "U" and len(content):
        code_points = content.view(np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if code_points.max() > LAST_CODE_POINT:
            raise NotArrays("a string has invalid code points")


# .npz files are untrusted: the zip directory is checked against the file, and memory is bounded by the size on disk.

Arrays = dict[str, NDArray[Any]]

# Errors for a file that is truncated, missing or not an .npz, or that lacks an array.  The zip's checksums detect every
# flipped bit.
UNREADABLE = (OSError, ValueError, KeyError)
# Errors that zipfile raises: ValueError for a name that is not text, EOFError for a read past the end.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError)

SUFFIX = ".npy"
MOST_MEMBERS = 10_000
LOCAL_HEADER_BYTES = 30  # without the name, which zipfile compares
REFUSED_FLAGS = 0x1 | 0x20 | 0x40  # encrypted, a patch, strongly encrypted
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Deflate can expand a byte to a thousand.  Images of clothes expand by 2, and blank images are rare.
EXPANDED_FREELY, MOST_EXPANSION = 256 << 20, 100


def read_arrays(path: Path, wanted: Container[str] | None = None) -> Arrays:
    """Read the wanted arrays, or all.  Raises OSError if the file cannot be read, NotArrays if it is not an .npz."""
    with open(path, "rb", opener=open_regular) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = validate_members(archive, file)
                return {
                    name: read_member(archive, member)
                    for name, member in members.items()
                    if wanted is None or name in wanted
                }
        except NotArrays:
            raise
        except MemoryError as error:
            raise NotArrays("there is not enough memory for its arrays") from error
        except ZIP_ERRORS as error:
            raise NotArrays(f"it is not a complete .npz: {error}") from error


def validate_members(archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """Check the zip directory, and return the arrays' members by name."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    if len(members) > MOST_MEMBERS:
        raise NotArrays(f"it has {len(members):,} members; the limit is {MOST_MEMBERS:,}")
    names = [member.filename.removesuffix(SUFFIX) for member in members]
    if len(set(names)) < len(names):
        raise NotArrays("it has two arrays of the same name")
    for member in members:
        if member.flag_bits & REFUSED_FLAGS or member.compress_type not in COMPRESSIONS:
            raise NotArrays(f"{member.filename} is encrypted, or its compression is not one of numpy's")
        if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
            raise NotArrays(f"{member.filename} is stored without compression, but its two sizes differ")
    ends = [member.header_offset + LOCAL_HEADER_BYTES + member.compress_size for member in members]
    begins = [*(member.header_offset for member in members), archive.start_dir]
    if begins[0] < 0 or any(end > begin for end, begin in zip(ends, begins[1:], strict=True)):
        raise NotArrays("its members overlap")
    require_expansion(sum(member.file_size for member in members), os.fstat(file.fileno()).st_size)
    return {name: member for name, member in zip(names, members, strict=True) if member.filename.endswith(SUFFIX)}


def require_expansion(size: int, stored: int) -> None:
    """Raise NotArrays for a zip bomb."""
    if size > max(EXPANDED_FREELY, MOST_EXPANSION * stored):
        raise NotArrays(f"its {stored:,} bytes would expand to {size:,}; the limit is {MOST_EXPANSION} times the size")


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        return read_array(file.read, member.file_size)


def write_arrays(path: Path, arrays: Arrays, is_private: bool = False) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    disk.write_file(path, content.getbuffer(), is_private)


def fingerprint(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class Texts:
    """A compact list of short strings, stored in two arrays.  A list of a million takes ten times the memory."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Texts":
        encoded = [os.fsencode(text) for text in texts]
        content = np.frombuffer(b"".join(encoded), np.uint8)
        return cls(content, np.cumsum([len(text) for text in encoded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def require_consistent(self) -> None:
        """Raise ValueError if the arrays do not hold valid paths."""
        is_text = self.content.dtype == np.uint8 and self.content.ndim == 1
        if not is_text or self.ends.dtype != np.int64 or self.ends.ndim != 1:
            raise ValueError("strings are not stored as bytes and end offsets")
        steps = np.diff(self.ends, prepend=0)
        if (steps < 0).any() or steps.sum() != len(self.content) or not self.content.all():
            raise ValueError("strings have invalid end offsets or NUL bytes")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.content[start : self.ends[number]].tobytes())
