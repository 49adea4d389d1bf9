"""Opens files that someone else has put there: regular ones only, and no more of them than there should be.

A FIFO would block whoever opens it for ever, a device may have no end; links to regular files are as good as these.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def require_regular(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_regular(path: str | Path, flags: int = FLAGS, mode: int = 0o666) -> int:
    """A descriptor, such as `open` takes as its opener's.  OSError where it is something else than a file."""
    descriptor = os.open(path, FLAGS | flags, mode)
    try:
        require_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[int, int]]:
    """A descriptor and how many bytes there are."""
    descriptor = open_regular(path)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def reading(path: str | Path) -> BinaryIO:
    """A file object, for a `with`."""
    return os.fdopen(open_regular(path), "rb")


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """The whole file, if it is one and not larger."""
    with reading(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content
