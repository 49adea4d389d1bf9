"""Repair of a store file after a process was killed while writing to it."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from megabatch.ranks.launch import create_store_file, drop_partial_entry


def write_entries(descriptor: int) -> bytes:
    store = dist.FileStore(f"/dev/fd/{descriptor}", -1)
    store.set("first", "1")
    store.set("prefix/second", "two " * 100)
    store.add("count", 3)
    store.set("gone", "")
    store.delete_key("gone")
    del store  # its destructor writes too
    return os.pread(descriptor, 1 << 20, 0)


def test_complete_entries_stay_and_a_partial_one_is_dropped() -> None:
    descriptor = create_store_file()
    content = write_entries(descriptor)
    assert not drop_partial_entry(descriptor) and os.pread(descriptor, 1 << 20, 0) == content
    ends = set()
    for length in range(len(content)):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content[:length], 0)
        was_partial = drop_partial_entry(descriptor)
        ends.add(os.fstat(descriptor).st_size)
        assert was_partial == (os.fstat(descriptor).st_size < length)
    assert max(ends) < len(content) and len(ends) >= 4  # an empty file, and the end of each entry


def test_entries_after_a_partial_one_are_dropped() -> None:
    descriptor = create_store_file()
    content = write_entries(descriptor)
    os.pwrite(
        descriptor, b"\x07\0\0\0/kil" + content, len(content)
    )  # killed within a key; another process writes after it
    assert drop_partial_entry(descriptor) and os.pread(descriptor, 1 << 20, 0) == content


READ = """
import sys, torch.distributed as dist
store = dist.FileStore(f"/dev/fd/{sys.argv[1]}", -1)
print(store.get("first"), store.check(["absent"]), store.add("count", 1))
"""


@pytest.mark.parametrize("part", [b"\x05\0", b"\x05\0\0\0", b"\x05\0\0\0/ab", b"\x02\0\0\0/a\x09\0\0\0val"])
def test_a_repaired_store_can_be_read_and_written(part: bytes) -> None:
    descriptor = create_store_file()
    content = write_entries(descriptor)
    os.pwrite(descriptor, part, len(content))
    drop_partial_entry(descriptor)
    read = subprocess.run(
        [sys.executable, "-c", READ, str(descriptor)], pass_fds=[descriptor], capture_output=True, text=True, timeout=60
    )
    assert read.stdout == "b'1' False 4\n", read.stderr
