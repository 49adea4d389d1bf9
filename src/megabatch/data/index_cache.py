"""What was found on disk, kept for the next time: listing a million files takes seconds, on a file server minutes.

An index lies in $XDG_CACHE_HOME/megabatch (or ~/.cache/megabatch) under a hash of what it indexes, and holds what its
validity is judged by.  Ranks that start together take turns on a lock: the first makes the index, the others find it.
Nothing depends on the cache: where there is none, or another user could have written it, the index is made again.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from megabatch import disk
from megabatch.data.npz import UNREADABLE, Arrays, read_arrays, write_arrays

FORMAT = 2  # counts what indexes hold, and what they make of the names of splits
TICK_NS = 20_000_000  # of a file system's clock, at most


def cached_index(kind: str, place: Path, build: Callable[[], Arrays], is_current: Callable[[Arrays], bool]) -> Arrays:
    """The index of `place`, from the cache if it is there and current."""
    digest = hashlib.sha256(os.fsencode(f"{FORMAT} {kind} {place.resolve()}")).hexdigest()[:32]
    folder = disk.cache_folder()
    if folder is None:
        return build()
    path = folder / f"{kind}-{digest}.npz"
    found = read_current(path, is_current)
    if found is not None:
        return found
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # without a lock, several may build it
            held.enter_context(disk.take_lock(path.with_suffix(".lock"), wait=True))
            found = read_current(path, is_current)
        if found is None:
            found = build()
            with contextlib.suppress(OSError):
                write_arrays(path, found, is_private=True)
    return found


def read_current(path: Path, is_current: Callable[[Arrays], bool]) -> Arrays | None:
    try:
        arrays = read_arrays(path)
        return arrays if is_current(arrays) else None
    except UNREADABLE:
        return None


def settled_mtime(path: Path) -> int:
    """When it was last changed, in ns; what is changed after this call has another mtime.

    Two changes within one tick of the file system's clock have the same: where the last is that new, wait it out.
    """
    mtime = path.stat().st_ctime_ns
    if 0 <= time.time_ns() - mtime < TICK_NS:
        time.sleep(TICK_NS / 1e9)
        mtime = path.stat().st_ctime_ns
    return mtime
