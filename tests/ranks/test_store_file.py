"""A store that a killed process was writing to can be read again."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from megabatch.ranks.launch import make_store_file, mend


def write_entries(descriptor: int) -> bytes:
    store = dist.FileStore(f"/dev/fd/{descriptor}", -1)
    store.set("first", "1")
    store.set("prefix/second", "two " * 100)
    store.add("count", 3)
    store.set("gone", "")
    store.delete_key("gone")
    del store  # which writes, too
    return os.pread(descriptor, 1 << 20, 0)


def test_whole_entries_stay_and_a_part_of_one_goes() -> None:
    descriptor = make_store_file()
    content = write_entries(descriptor)
    assert not mend(descriptor) and os.pread(descriptor, 1 << 20, 0) == content
    ends = set()
    for length in range(len(content)):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content[:length], 0)
        was_torn = mend(descriptor)
        ends.add(os.fstat(descriptor).st_size)
        assert was_torn == (os.fstat(descriptor).st_size < length)
    assert max(ends) < len(content) and len(ends) >= 4  # nothing, and up to each entry


def test_what_was_written_behind_a_part_goes_with_it() -> None:
    descriptor = make_store_file()
    content = write_entries(descriptor)
    os.pwrite(descriptor, b"\x07\0\0\0/kil" + content, len(content))  # killed within a key; another goes on
    assert mend(descriptor) and os.pread(descriptor, 1 << 20, 0) == content


READ = """
import sys, torch.distributed as dist
store = dist.FileStore(f"/dev/fd/{sys.argv[1]}", -1)
print(store.get("first"), store.check(["absent"]), store.add("count", 1))
"""


@pytest.mark.parametrize("part", [b"\x05\0", b"\x05\0\0\0", b"\x05\0\0\0/ab", b"\x02\0\0\0/a\x09\0\0\0val"])
def test_a_store_that_was_mended_is_read_and_written_by_others(part: bytes) -> None:
    descriptor = make_store_file()
    content = write_entries(descriptor)
    os.pwrite(descriptor, part, len(content))
    mend(descriptor)
    read = subprocess.run(
        [sys.executable, "-c", READ, str(descriptor)], pass_fds=[descriptor], capture_output=True, text=True, timeout=60
    )
    assert read.stdout == "b'1' False 4\n", read.stderr
