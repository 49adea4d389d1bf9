"""Opens files that someone else has put there: regular ones only, and no more of them than there should be.

A FIFO would block whoever opens it for ever, a device may have no end; links to regular files are as good as these.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

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


# JSON from a file, into what it must be: whatever is wrong with it is one error, on one line.

Decoded = TypeVar("Decoded")

LONGEST_REASON = 200  # letters of what is wrong, which may quote the file


class Undecodable(ValueError):
    """Bytes that are not what they should be, and why."""


def decode_json(content: bytes | str, kind: type[Decoded]) -> Decoded:
    return decode_with(msgspec.json.Decoder(kind), content)


def decode_with(decoder: "msgspec.json.Decoder[Decoded]", content: bytes | str) -> Decoded:
    """msgspec raises three kinds of errors, of which one is its own."""
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise Undecodable(str(error)[:LONGEST_REASON]) from error.__cause__
    except UnicodeDecodeError as error:
        raise Undecodable(f"it is not text in UTF-8 ({error.reason})") from None
    except RecursionError:
        raise Undecodable("brackets within brackets without end") from None


# Small text files that a user gives: regular ones alone, and no more of them than such a file has.

Kind = TypeVar("Kind")

OPENED_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # what the shell has opened for us, perhaps as a pipe
LONGEST_JSON = 64 << 20  # bytes: a profile or a plan of thousands of tensors is a few of them


class NotText(ValueError):
    """What is wrong with the file's content."""


def read_bytes(path: str | Path, longest: int) -> bytes:
    """OSError if it is no regular file: a FIFO would be waited for, a device has no end.

    What this process was given open may be a pipe.
    """
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, "no file has a name with a NUL")
    is_given = str(path).startswith(OPENED_ALREADY)
    with os.fdopen(os.open(path, FLAGS & ~os.O_NONBLOCK if is_given else FLAGS), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (is_given and stat.S_ISFIFO(mode)):
            require_regular(mode, path)
        content = file.read(longest + 1)
    if len(content) > longest:
        raise NotText(f"it has more than the {longest:,} bytes that are read")
    return content


def read_text(path: str | Path, longest: int) -> str:
    try:
        return read_bytes(path, longest).decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise NotText(f"it is not text in UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: str | Path, kind: type[Kind]) -> Kind:
    """OSError if it cannot be read, Undecodable if it is something else."""
    try:
        return decode_json(read_bytes(path, LONGEST_JSON), kind)
    except NotText as error:
        raise Undecodable(str(error)) from None


# The bytes of encoded images, and of the small files beside them: none that is larger than it may be.

MEGABYTE = 1_000_000
MAX_FILE_MB = 256  # as much as 85 megapixels take that are not compressed
MOST_BYTES = MAX_FILE_MB * MEGABYTE


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """In half the time of Path.read_bytes, which asks for more than it needs to know."""
    descriptor = os.open(path, FLAGS)
    try:
        status = os.fstat(descriptor)
        require_regular(status.st_mode, path)
        require_modest(status.st_size, most_bytes)
        content = os.read(descriptor, status.st_size)
        while len(content) < status.st_size and (more := os.read(descriptor, status.st_size - len(content))):
            content += more
        return content
    finally:
        os.close(descriptor)


def require_modest(size: int, most_bytes: int) -> None:
    """An OSError, which whoever reads files expects anyway."""
    if size > most_bytes:
        limit = f"data.max_file_mb={most_bytes // MEGABYTE}"
        raise OSError(errno.EFBIG, f"its {size:,} bytes are more than {limit}")
