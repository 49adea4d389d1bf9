"""The folder in which a launcher and its ranks leave files for each other, locked as long as it is in use."""

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from megabatch.disk import take_lock

SCRATCH = "{scratch}"  # stands for the folder in the arguments of ranks
PREFIX, LOCK = "megabatch-", "launcher"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new one, removed at the end."""
    remove_abandoned()
    folder = Path(mkdtemp(prefix=PREFIX))
    try:
        with take_lock(folder / "unlocked"):
            (folder / "unlocked").rename(folder / LOCK)  # `remove_abandoned` never sees it without its lock
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Removes what launchers killed with -9 have left: nobody holds it any more."""
    for lock in Path(gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), take_lock(lock, patience_s=0.0):
            shutil.rmtree(lock.parent, ignore_errors=True)
