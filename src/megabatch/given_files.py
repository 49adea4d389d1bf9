"""Small text files that a user gives: regular ones alone, and no more of them than such a file has."""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

OPENED_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # what the shell has opened for us, perhaps as a pipe
LONGEST_JSON = 64 << 20  # bytes: a profile or a plan of thousands of tensors is a few of them
LONGEST_REASON = 200  # letters of what is wrong, which may quote the file


class NotText(ValueError):
    """What is wrong with the file's content."""


class NotJson(ValueError):
    """What is wrong with it, or with what it says."""


def read_bytes(path: str | Path, longest: int) -> bytes:
    """OSError if it is no regular file: a FIFO would be waited for, a device has no end.

    What this process was given open may be a pipe.
    """
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, "no file has a name with a NUL")
    is_given = str(path).startswith(OPENED_ALREADY)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_given else os.O_NONBLOCK))
    with os.fdopen(descriptor, "rb") as file:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(kind) or (is_given and stat.S_ISFIFO(kind))):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(longest + 1)
    if len(content) > longest:
        raise NotText(f"it has more than the {longest:,} bytes that are read")
    return content


def read_text(path: str | Path, longest: int) -> str:
    try:
        return read_bytes(path, longest).decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise NotText(f"it is not text in UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: str | Path, kind: type[T]) -> T:
    """OSError if it cannot be read, NotJson if it is something else."""
    try:
        return decode_json(read_bytes(path, LONGEST_JSON), kind)
    except NotText as error:
        raise NotJson(str(error)) from None


def decode_json(content: bytes, kind: type[T]) -> T:
    """msgspec raises three kinds of errors, of which one is its own."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise NotJson(str(error)[:LONGEST_REASON]) from error.__cause__
    except UnicodeDecodeError as error:
        raise NotJson(f"it is not text in UTF-8 ({error.reason})") from None
    except RecursionError:
        raise NotJson("brackets within brackets without end") from None
