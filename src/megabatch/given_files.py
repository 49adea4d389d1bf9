"""Small text files that a user gives: regular ones alone, and no more of them than such a file has."""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

from megabatch.decoding import Undecodable, decode_json
from megabatch.regular_files import FLAGS, require_regular

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
