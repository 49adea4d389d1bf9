"""The store of a launcher's ranks, as a file in memory that they inherit.

torch's FileStore appends to its file, under a lock: the length of a key, the key, the length of its value, the value.
A process that is killed in between leaves a part, and whoever reads that waits for the rest, for ever, with the lock in
hand.  So the launcher reads once its ranks have ended, and mends the file first.
"""

import os
from collections.abc import Iterator


def make_store_file() -> int:
    """Its descriptor, which is never closed: a store's destructor opens it by its number."""
    return os.memfd_create("megabatch-store")


def mend(descriptor: int) -> bool:
    """Removes what does not belong to a whole entry; whether there was any.  For when nobody writes."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole = max(ends_of_entries(content), default=0)
    os.ftruncate(descriptor, whole)
    return whole < len(content)


def ends_of_entries(content: bytes) -> Iterator[int]:
    """Of those before the first that is none."""
    begin = 0
    while begin < len(content):
        key, end = read_text(content, begin)
        value, end = read_text(content, end)
        if (
            not key or value is None or not key.decode("ascii", "replace").isprintable()
        ):  # all keys are: lengths are not
            return
        yield end
        begin = end


def read_text(content: bytes, begin: int) -> tuple[bytes | None, int]:
    """A text behind its length, and where it ends; None if it is not all there."""
    length = int.from_bytes(content[begin : begin + 4], "little")
    text = content[begin + 4 : begin + 4 + length]
    is_whole = begin + 4 <= len(content) and len(text) == length
    return (text if is_whole else None), begin + 4 + length
