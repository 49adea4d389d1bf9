"""Files that are whole, and folders that belong to one process at a time.

A file or folder is written under another name, synced and renamed: whoever looks finds all of it or what was there
before, also after a kill.  A lock is `flock` on a file: the kernel releases it however its process ends.

What is private (runs, caches, locks) is made for its user alone, 0700 and 0600, or less where the umask says so; what
is made to be handed on (packs, exports, reports) follows the umask.  Nothing private is written through a symbolic
link: another user may have put it there.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, TextIO

from megabatch.io.reading import open_regular, reading
from megabatch.text import print_line

WRITING = ".writing-"  # begins the name of what is not whole yet
PATIENCE_S = 1.0  # `is_locked` touches a lock for a moment
CHUNK_BYTES = 4 << 20  # that are hashed and written, or read and hashed, at a time
REMEDIES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in that quota, or raise it",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "allow its owner to write there",
    errno.EPERM: "allow its owner to write there",
    errno.EIO: "see what is wrong with that disk",
    errno.ESTALE: "mount that file system again",
}


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A name for the block to write a file or folder under, which becomes `path` if the block does not raise."""
    new = unfinished(path)
    try:
        yield new
        sync(*(sorted(new.rglob("*")) if new.is_dir() else ()), new)
        new.rename(path)
    except BaseException:
        with suppress(OSError):  # what went wrong is said already
            remove(new)
        raise
    sync(path.parent)


def unfinished(path: Path) -> Path:
    """A name that nobody can foresee, and put something else under."""
    return path.with_name(f"{WRITING}{path.name}-{secrets.token_hex(8)}")


def private(path: str, flags: int) -> int:
    """For `open(..., opener=private)`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def make_private(folder: Path) -> None:
    """One that is there stays as it is: its owner has said who may enter.  Its parents follow the umask."""
    folder.mkdir(0o700, parents=True, exist_ok=True)


def write_file(path: Path, content: str | bytes | memoryview, is_private: bool = False) -> Path:
    """The whole file, or the one before it."""
    with writing(path) as new, open(new, "xb", buffering=0, opener=private if is_private else None) as file:
        write_all(file, memoryview(content.encode() if isinstance(content, str) else content))
    return path


def write_hashed(path: Path, parts: Iterable[memoryview]) -> str:
    """Writes them one after another, privately; the sha256 of the file.  Python's lock is not held over either."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0, opener=private) as file:
        for part in parts:
            for begin in range(0, len(part), CHUNK_BYTES):
                chunk = part[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                write_all(file, chunk)
    return digest.hexdigest()


def write_all(file: BinaryIO, content: memoryview) -> None:
    """A disk that is nearly full takes a part, and says so at the next."""
    while content:
        content = content[file.write(content) :]


def read_hashed(path: Path, into: memoryview) -> str:
    """Fills it from the file; the sha256 of what was read."""
    with reading(path) as file:
        return fill_hashed(file, into)


def fill_hashed(file: BinaryIO, into: memoryview) -> str:
    digest, begin = hashlib.sha256(), 0
    while begin < len(into):
        count = file.readinto(into[begin : begin + CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise OSError(errno.EIO, f"it ends after {begin:,} of {len(into):,} bytes", file.name)
        digest.update(into[begin : begin + count])
        begin += count
    return digest.hexdigest()


def remedy(error: OSError) -> str:
    """What a user can do where something could not be written."""
    return REMEDIES.get(error.errno or 0, "see that it can be written to")


def point(link: Path, name: str) -> None:
    """Makes `link` a symbolic link to its neighbour `name`, in one move."""
    new = unfinished(link)
    new.symlink_to(name)
    new.rename(link)


def remove_unfinished(folder: Path) -> None:
    """What a killed process was writing; for whoever holds the folder's lock."""
    for path in folder.glob(f"{WRITING}*"):
        remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(*paths: Path) -> None:
    """What is written there, or the names in a folder, are on the disk when this returns."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Locked(BlockingIOError):
    """Another process holds the lock: `holder`, as far as it has said so."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by process {holder}")
        self.holder = holder


def take_lock(path: Path, *, wait: bool = False, patience_s: float | None = None) -> TextIO:
    """The lock, until the file is closed.  Raises `Locked` if another process holds it, or waits for that one."""
    with ExitStack() as opened:
        file = opened.enter_context(open_own(path))
        patience_s = PATIENCE_S if patience_s is None else patience_s
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    file.seek(0)
                    raise Locked(path, file.read().strip()) from None
                time.sleep(patience_s / 10)
        with suppress(OSError):  # a disk that is full: then nobody knows who holds it
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        opened.pop_all()  # it stays open
        return file


def open_to_append(path: Path) -> int:
    """A descriptor: this user's file alone, never through a link, and a FIFO is not waited for."""
    return open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def open_own(path: Path) -> TextIO:
    """The same as a file, to be appended to and read."""
    return os.fdopen(open_to_append(path), "a+")


def is_locked(path: Path) -> bool:
    with suppress(OSError), reading(path) as file:  # what is no file, or closed to this user, nobody holds
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cache_folder() -> Path | None:
    """Where what can be found or measured again is kept: $XDG_CACHE_HOME/megabatch, or ~/.cache/megabatch.

    What lies there is believed.  So it must be this user's, and nobody else's to write to; None: there is none such.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megabatch"
    except RuntimeError:  # a user without a home, as in some containers
        say_once("nothing is cached: this user has no home; set XDG_CACHE_HOME to a folder of theirs")
        return None
    try:
        make_private(path)
        found = path.stat()
    except OSError:  # it cannot be made
        return None
    problem = why_untrusted(found.st_uid, found.st_mode, os.geteuid())
    if problem:
        say_once(f"{path} is not used: {problem}")
    return None if problem else path


def why_untrusted(owner: int, mode: int, user: int) -> str | None:
    if owner != user:
        return f"it belongs to user {owner}, and this is user {user}; set XDG_CACHE_HOME to a folder of yours"
    if mode & 0o022:
        return f"others may write to it (mode {mode & 0o777:o}); remove it, or chmod 700 it if you trust what is there"
    return None


@cache
def say_once(text: str) -> None:
    """To the user: by the launcher, or by the first rank of a host."""
    if "MEGABATCH_LAUNCHER" not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        print_line(f"megabatch: {text}", to_stderr=True)
