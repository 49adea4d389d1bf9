"""Arrays in .npz files: on disk is the whole file or the one before it, and never a pickle."""

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch import disk

Arrays = dict[str, NDArray[Any]]

# What a file that is torn, missing, or something else raises.  The zip's checksums find every flipped bit.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)


def read_arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


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

    def __getitem__(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.content[start : self.ends[number]].tobytes())
