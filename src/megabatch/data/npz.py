"""Arrays in .npz files: on disk is the whole file or the one before it, and never a pickle.

What is read may come from anywhere: everything that a zip says of its members is compared with the file before it is
believed, and no more memory is taken than the bytes on disk can stand for.
"""

import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megabatch import disk
from megabatch.data.npy import NotArrays, read_array
from megabatch.regular_files import open_regular

Arrays = dict[str, NDArray[Any]]

# What a file that is torn, missing, or something else raises, and what lacks an array.  The zip's checksums find every
# flipped bit.
UNREADABLE = (OSError, ValueError, KeyError)
# What zipfile raises itself; a name that is no text is a ValueError, and what is read beyond the end an EOFError.
NO_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError)

SUFFIX = ".npy"
MOST_MEMBERS = 10_000
LOCAL_HEADER_BYTES = 30  # and the name, which zipfile compares
REFUSED_FLAGS = 0x1 | 0x20 | 0x40  # encrypted, a patch, strongly encrypted
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Deflate can make a thousand of a byte; images of clothes become 2, blank ones are few.
EXPANDED_FREELY, MOST_EXPANSION = 256 << 20, 100


def read_arrays(path: Path, wanted: Container[str] | None = None) -> Arrays:
    """Those that are wanted, or all.  OSError where the file cannot be read, NotArrays where it is something else."""
    with open(path, "rb", opener=open_regular) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = checked_members(archive, file)
                return {
                    name: read_member(archive, member)
                    for name, member in members.items()
                    if wanted is None or name in wanted
                }
        except NotArrays:
            raise
        except MemoryError as error:
            raise NotArrays("there is not enough memory for its arrays") from error
        except NO_ZIP as error:
            raise NotArrays(f"it is no whole zip of arrays: {error}") from error


def checked_members(archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """The arrays by name, as far as the zip's directory can be believed."""
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    if len(members) > MOST_MEMBERS:
        raise NotArrays(f"it has {len(members):,} members, more than {MOST_MEMBERS:,}")
    names = [member.filename.removesuffix(SUFFIX) for member in members]
    if len(set(names)) < len(names):
        raise NotArrays("it has two arrays of one name")
    for member in members:
        if member.flag_bits & REFUSED_FLAGS or member.compress_type not in COMPRESSIONS:
            raise NotArrays(f"{member.filename} is encrypted, or compressed by other means than numpy's")
        if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
            raise NotArrays(f"{member.filename} is stored, and its two sizes differ")
    ends = [member.header_offset + LOCAL_HEADER_BYTES + member.compress_size for member in members]
    begins = [*(member.header_offset for member in members), archive.start_dir]
    if begins[0] < 0 or any(end > begin for end, begin in zip(ends, begins[1:], strict=True)):
        raise NotArrays("its members overlap")
    require_expansion(sum(member.file_size for member in members), os.fstat(file.fileno()).st_size)
    return {name: member for name, member in zip(names, members, strict=True) if member.filename.endswith(SUFFIX)}


def require_expansion(size: int, stored: int) -> None:
    """Refuses a few bytes that stand for more than a machine has."""
    if size > max(EXPANDED_FREELY, MOST_EXPANSION * stored):
        raise NotArrays(f"its {stored:,} bytes would become {size:,}, more than {MOST_EXPANSION} times as many")


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
    """A million short texts in two arrays; as a list they would take ten times the memory."""

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
        """ValueError where the arrays are no texts such as the system takes for paths."""
        is_text = self.content.dtype == np.uint8 and self.content.ndim == 1
        if not is_text or self.ends.dtype != np.int64 or self.ends.ndim != 1:
            raise ValueError("texts are not bytes and where they end")
        steps = np.diff(self.ends, prepend=0)
        if (steps < 0).any() or steps.sum() != len(self.content) or not self.content.all():
            raise ValueError("texts do not end where they should")

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.content[start : self.ends[number]].tobytes())
