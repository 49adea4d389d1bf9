"""Memory that the ranks of a host share: how it is made, and mapped by the others.

The file behind it has mode 0600 and no name, so nothing is left in /dev/shm however a rank ends.
"""

import os
import platform
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megabatch.ranks.store import are_set
from megabatch.torch_api import share_by_descriptor


class MissingRank(RuntimeError):
    """A rank died, left, or did not come in time."""


class Unmapped(RuntimeError):
    """Memory could not be shared between the ranks of this host."""


def is_supported() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))  # Linux 5.3, and containers that allow it
    except OSError:
        return False
    return True


def map_storage(pid: int, descriptor: int, num_bytes: int) -> torch.UntypedStorage:
    """The memory behind another process's file descriptor.  Ours is closed as soon as it is mapped."""
    storage = torch.UntypedStorage.from_file(f"/proc/{pid}/fd/{descriptor}", True, num_bytes)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def join(
    store: "dist.Store",  # type: ignore[name-defined]
    rank: int,
    num_ranks: int,
    timeout_s: float,
    names: Sequence[int],
    num_words: int,
) -> tuple[torch.Tensor, list[int]]:
    """The control segment, which rank 0 makes and the others map, and the process ids of all ranks."""
    # Several may share a store; all ranks make them in the same order.
    generation = store.add(f"shared-memory/{rank}", 1)
    prefix = f"shared-memory/{generation}"
    error = ""
    try:
        if rank == 0:
            segment = torch.zeros(num_words, dtype=torch.int64)
            descriptor, num_bytes = share_by_descriptor(segment.untyped_storage())
            store.set(f"{prefix}/segment", f"{os.getpid()} {descriptor} {num_bytes}")
        else:
            where = receive(store, f"{prefix}/segment", timeout_s, names[0])
            storage = map_storage(*map(int, where.split()))
            segment = torch.empty(0, dtype=torch.int64).set_(storage)
    except RuntimeError as caught:
        error = str(caught).partition("\n")[0]
    store.set(f"{prefix}/{rank}", f"{os.getpid()} {error}")
    pids = []
    for peer in range(num_ranks):
        pid, _, error = receive(store, f"{prefix}/{peer}", timeout_s, names[peer]).partition(" ")
        if error:
            raise Unmapped(f"rank {names[peer]} cannot map shared memory ({error}); use Gloo on this host")
        pids.append(int(pid))
    return segment, pids


def receive(store: "dist.Store", key: str, timeout_s: float, name: int) -> str:  # type: ignore[name-defined]
    if not are_set(store, [key], timeout_s):
        message = f"rank {name} did not come within {timeout_s:g} s to set up shared memory; see its own output"
        raise MissingRank(message)
    return str(store.get(key).decode())
