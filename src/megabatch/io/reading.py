"""Read untrusted files: only regular files, up to a size limit.

Opening a FIFO could block forever, and a device may have no end.  Links to regular files are allowed.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def require_regular(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_regular(path: str | Path, flags: int = FLAGS, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor, as an `opener` of `open`.  Raise OSError for other files."""
    descriptor = os.open(path, FLAGS | flags, mode)
    try:
        require_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def reading(path: str | Path) -> BinaryIO:
    """Open a regular file for reading."""
    return os.fdopen(open_regular(path), "rb")


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Read a regular file of at most `most_bytes` bytes.  Raises OSError for any other."""
    with reading(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
    return content


Decoded = TypeVar("Decoded")

LONGEST_REASON = 200  # characters of an error message, which may quote the file


class Undecodable(ValueError):
    """Error for JSON that cannot be decoded as the expected type; the message is one line."""


def decode_json(content: bytes | str, kind: type[Decoded]) -> Decoded:
    return decode_with(msgspec.json.Decoder(kind), content)


def decode_with(decoder: "msgspec.json.Decoder[Decoded]", content: bytes | str) -> Decoded:
    """Decode JSON, and raise each of the three kinds of errors of msgspec as Undecodable."""
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise Undecodable(str(error)[:LONGEST_REASON]) from error.__cause__
    except UnicodeDecodeError as error:
        raise Undecodable(f"it is not text in UTF-8 ({error.reason})") from None
    except RecursionError:
        raise Undecodable("it is nested too deeply") from None


Kind = TypeVar("Kind")

OPENED_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # opened by the shell, perhaps as a pipe
LONGEST_JSON = 64 << 20  # bytes; a profile or a plan of thousands of tensors takes a few MB


class NotText(ValueError):
    """Error for a file that is too large or is not UTF-8."""


def read_bytes(path: str | Path, longest: int) -> bytes:
    """Read a file of at most `longest` bytes.  Raises OSError if it is not a regular file, NotText if it is larger.

    A descriptor that the shell opened for this process may also be a pipe.
    """
    if "\0" in str(path):
        raise FileNotFoundError(errno.ENOENT, "its name contains a NUL character")
    is_inherited = str(path).startswith(OPENED_ALREADY)
    with os.fdopen(os.open(path, FLAGS & ~os.O_NONBLOCK if is_inherited else FLAGS), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (is_inherited and stat.S_ISFIFO(mode)):
            require_regular(mode, path)
        content = file.read(longest + 1)
    if len(content) > longest:
        raise NotText(f"it is larger than {longest:,} bytes")
    return content


def read_text(path: str | Path, longest: int) -> str:
    try:
        return read_bytes(path, longest).decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise NotText(f"it is not text in UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: str | Path, kind: type[Kind]) -> Kind:
    """Read JSON as `kind`.  Raises OSError if the file cannot be read, Undecodable if its content is invalid."""
    try:
        return decode_json(read_bytes(path, LONGEST_JSON), kind)
    except NotText as error:
        raise Undecodable(str(error)) from None


MEGABYTE = 1_000_000
MAX_FILE_MB = 256  # 85 megapixels without compression
MOST_BYTES = MAX_FILE_MB * MEGABYTE


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read an encoded image.  Takes half the time of Path.read_bytes, which makes more system calls."""
    descriptor = os.open(path, FLAGS)
    try:
        status = os.fstat(descriptor)
        require_regular(status.st_mode, path)
        require_file_size(status.st_size, most_bytes)
        content = os.read(descriptor, status.st_size)
        while len(content) < status.st_size and (more := os.read(descriptor, status.st_size - len(content))):
            content += more
        return content
    finally:
        os.close(descriptor)


def require_file_size(size: int, most_bytes: int) -> None:
    """Raise OSError, which callers handle anyway, if a file is too large."""
    if size > most_bytes:
        limit = f"data.max_file_mb={most_bytes // MEGABYTE}"
        raise OSError(errno.EFBIG, f"its {size:,} bytes exceed {limit}")
