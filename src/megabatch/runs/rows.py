"""metrics.jsonl, as it is appended to.

What the disk does not take waits in memory, in order, and follows when it does: no row is lost or there twice, though
one may be cut in two for a while.  A file that is not in its place any more, or that the disk has failed to keep, is
written again from the descriptor that is still open: a removed file is there until that is closed.
"""

import os
import threading
from pathlib import Path

from megabatch.disk import CHUNK_BYTES, open_to_append, private, writing
from megabatch.runs.reader import length_up_to


class RowFile:
    """One thread appends, and another may sync."""

    def __init__(self, path: Path, step: int) -> None:
        """Keeps the rows up to `step`."""
        self.path = path
        self.lock = threading.Lock()
        self.waiting = bytearray()
        self.is_suspect = False  # a sync has failed: the kernel may have forgotten what it was to write
        self.descriptor = open_to_append(path)
        try:
            os.ftruncate(self.descriptor, length_up_to(path, step))
        except OSError:
            os.close(self.descriptor)
            raise

    def append(self, row: bytes) -> None:
        with self.lock:
            self.waiting += row

    def flush(self) -> None:
        """What waits is in the file when this returns."""
        with self.lock:
            while self.waiting:
                count = os.write(self.descriptor, self.waiting)
                del self.waiting[:count]

    def sync(self) -> None:
        """Every row so far is on the disk when this returns.  Rows may be appended meanwhile."""
        self.flush()
        try:
            os.fsync(self.descriptor)
        except OSError:
            self.is_suspect = True
            raise

    def is_in_place(self) -> bool:
        try:
            return not self.is_suspect and os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def write_again(self) -> None:
        with self.lock:
            with writing(self.path) as new, open(new, "xb", opener=private) as file:
                begin = 0
                while chunk := os.pread(self.descriptor, CHUNK_BYTES, begin):
                    file.write(chunk)
                    begin += len(chunk)
            before, self.descriptor = self.descriptor, open_to_append(self.path)
            os.close(before)
            self.is_suspect = False

    def close(self) -> None:
        os.close(self.descriptor)
