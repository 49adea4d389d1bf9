"""Atomic writes, locks and private files.

A file or folder is written under a temporary name, synced and renamed.  A reader sees the complete new version or the
previous one, even after a kill.  A lock is `flock` on a file, which the kernel releases when the process ends.

Private files (runs, caches, locks) have mode 0700 or 0600, or less if the umask requires it.  Shared files (packs,
exports, reports) follow the umask.  Private files are not written through symbolic links, which another user may have
created.
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

WRITING = ".writing-"  # prefix of temporary names
PATIENCE_S = 1.0  # `is_locked` holds a lock for a moment
CHUNK_BYTES = 4 << 20  # hashed and written, or read and hashed, at a time
REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space, or raise the disk quota",
    errno.EFBIG: "raise the limit on the file size (ulimit -f)",
    errno.EROFS: "mount the file system for writing",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EIO: "check that disk for errors",
    errno.ESTALE: "mount that file system again",
}


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `path` if the block does not raise."""
    new = temporary_path(path)
    try:
        yield new
        sync(*(sorted(new.rglob("*")) if new.is_dir() else ()), new)
        new.rename(path)
    except BaseException:
        with suppress(OSError):  # the first error is raised
            remove(new)
        raise
    sync(path.parent)


def temporary_path(path: Path) -> Path:
    """Return a random name, so that another user cannot create it first."""
    return path.with_name(f"{WRITING}{path.name}-{secrets.token_hex(8)}")


def private(path: str, flags: int) -> int:
    """Opener for private files: `open(..., opener=private)`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def make_private(folder: Path) -> None:
    """Create a private folder.  An existing one keeps its mode.  Its parents follow the umask."""
    folder.mkdir(0o700, parents=True, exist_ok=True)


def write_file(path: Path, content: str | bytes | memoryview, is_private: bool = False) -> Path:
    """Write a file atomically."""
    with writing(path) as new, open(new, "xb", buffering=0, opener=private if is_private else None) as file:
        write_all(file, memoryview(content.encode() if isinstance(content, str) else content))
    return path


def write_hashed(path: Path, parts: Iterable[memoryview]) -> str:
    """Write the parts to a private file, and return its sha256.  The GIL is released while hashing and writing."""
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0, opener=private) as file:
        for part in parts:
            for begin in range(0, len(part), CHUNK_BYTES):
                chunk = part[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                write_all(file, chunk)
    return digest.hexdigest()


def write_all(file: BinaryIO, content: memoryview) -> None:
    """Write all bytes.  A disk that is nearly full takes only a part, and the next write raises."""
    while content:
        content = content[file.write(content) :]


def fill_hashed(file: BinaryIO, into: memoryview) -> str:
    """Fill `into` from a file, and return the sha256 of these bytes."""
    digest, begin = hashlib.sha256(), 0
    while begin < len(into):
        count = file.readinto(into[begin : begin + CHUNK_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise OSError(errno.EIO, f"it ends after {begin:,} of {len(into):,} bytes", file.name)
        digest.update(into[begin : begin + count])
        begin += count
    return digest.hexdigest()


def remedy(error: OSError) -> str:
    """Return the remedy for a failed write."""
    return REMEDIES.get(error.errno or 0, "check its permissions and the disk")


def replace_link(link: Path, name: str) -> None:
    """Make `link` a symbolic link to `name` in the same folder, atomically."""
    new = temporary_path(link)
    new.symlink_to(name)
    new.rename(link)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of a killed process.  The caller holds the folder's lock."""
    for path in folder.glob(f"{WRITING}*"):
        remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(*paths: Path) -> None:
    """Write files, or the entries of folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Locked(BlockingIOError):
    """Error for a lock that another process holds; `holder` is its process id, if known."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by process {holder}")
        self.holder = holder


def take_lock(path: Path, *, wait: bool = False) -> TextIO:
    """Take a lock, which is held until the returned file is closed.

    Args:
        path: the lock file.
        wait: wait until the lock is free; otherwise `Locked` is raised after `PATIENCE_S`.
    """
    with ExitStack() as opened:
        file = opened.enter_context(open_private(path))
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    file.seek(0)
                    raise Locked(path, file.read().strip()) from None
                time.sleep(PATIENCE_S / 10)
        with suppress(OSError):  # on a full disk the holder is unknown
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        opened.pop_all()  # keep the file open
        return file


def open_to_append(path: Path) -> int:
    """Open a private file for appending, and return its descriptor.  Refuses links, and does not wait for FIFOs."""
    return open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def open_private(path: Path) -> TextIO:
    """Open a private file for appending and reading."""
    return os.fdopen(open_to_append(path), "a+")


def is_locked(path: Path) -> bool:
    with suppress(OSError), reading(path) as file:  # other files, or files without access, are not locks
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cache_folder() -> Path | None:
    """Return the cache folder, $XDG_CACHE_HOME/megabatch or ~/.cache/megabatch, or None if it cannot be trusted.

    Its content is trusted.  So it must belong to this user, and other users must not have write access.
    """
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megabatch"
    except RuntimeError:  # a user without a home, as in some containers
        print_once(
            "caching is off: this user has no home directory; set XDG_CACHE_HOME to a folder that this user owns"
        )
        return None
    try:
        make_private(path)
        found = path.stat()
    except OSError:  # the folder cannot be created
        return None
    problem = trust_problem(found.st_uid, found.st_mode, os.geteuid())
    if problem:
        print_once(f"{path} is not used: {problem}")
    return None if problem else path


def trust_problem(owner: int, mode: int, user: int) -> str | None:
    if owner != user:
        return f"it belongs to user {owner}, not to user {user}; set XDG_CACHE_HOME to a folder that you own"
    if mode & 0o022:
        return (
            f"other users can write to it (mode {mode & 0o777:o}); remove it, or chmod 700 it if you trust its content"
        )
    return None


@cache
def print_once(text: str) -> None:
    """Print a line once per node: by the launcher, or by local rank 0."""
    if "MEGABATCH_LAUNCHER" not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        print_line(f"megabatch: {text}", to_stderr=True)
