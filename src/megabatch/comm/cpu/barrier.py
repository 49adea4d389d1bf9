"""A barrier of the ranks on one node, at which all must agree on their next operation.

Legend: p ranks; a control segment of 64-bit words in shared memory, of which each rank writes only its own lines.
Idea: a rank arrives by writing a larger number into its word, then waits until the words of all others are as large.
Before it arrives at the first barrier of an operation it writes a header (operation, buffer, elements, step, bucket,
...).  After that barrier all ranks compare all headers, and all find the same difference.
Cost: one cache line moves to each of p - 1 ranks; 1 to 2 us between two free cores, from Python.

A rank waits in three stages: a short spin, because the others usually arrive within microseconds; then sched_yield,
because with more ranks than cores the awaited rank needs this core; then sleeps, because a long wait means that a
backward pass (perhaps this rank's, in another thread: both release the GIL) needs the core more.  While it sleeps, the
rank checks for ranks that have died or left.

There are no fences.  On x86-64 stores become visible in program order and loads are made in order, so a rank that sees
the number also sees everything written before it.  Non-temporal stores are the exception; memcpy ends them with an
sfence.  Writing an aligned word is one store.  Other architectures do not guarantee this: `is_supported`.
"""

import contextlib
import ctypes
import os
import platform
import select
import struct
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from msgspec import Struct

from megabatch.ranks.store import wait_for_keys
from megabatch.telemetry.timeline import name_bucket
from megabatch.text import name_ranks
from megabatch.torch_api import share_by_descriptor

# Shared memory of the ranks on a node.  Its file has mode 0600 and no name, so nothing remains in /dev/shm when a rank
# ends, even if it is killed.


class MissingRank(RuntimeError):
    """A rank died, left, or did not arrive in time."""


class LateRank(MissingRank):
    """A rank did not arrive in time, and may still run and report its activity."""


class Unmapped(RuntimeError):
    """Memory could not be shared between the ranks of this node."""


def is_supported() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))  # Linux 5.3, and containers that allow it
    except OSError:
        return False
    return True


def map_storage(pid: int, descriptor: int, num_bytes: int) -> torch.UntypedStorage:
    """Map the memory of another process's file descriptor.  The descriptor in this process is closed after mapping."""
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
    """Return the control segment, which rank 0 creates and the others map, and the process ids of all ranks."""
    # Several segments may share a store; all ranks create them in the same order.
    generation = store.add(f"shared-memory/{rank}", 1)
    prefix = f"shared-memory/{generation}"
    error = ""
    try:
        if rank == 0:
            segment = torch.zeros(num_words, dtype=torch.int64)
            descriptor, num_bytes = share_by_descriptor(segment.untyped_storage())
            store.set(f"{prefix}/segment", f"{os.getpid()} {descriptor} {num_bytes}")
        else:
            address = receive(store, f"{prefix}/segment", timeout_s, names[0])
            storage = map_storage(*map(int, address.split()))
            segment = torch.empty(0, dtype=torch.int64).set_(storage)
    except RuntimeError as caught:
        error = str(caught).partition("\n")[0]
    store.set(f"{prefix}/{rank}", f"{os.getpid()} {error}")
    pids = []
    for peer in range(num_ranks):
        pid, _, error = receive(store, f"{prefix}/{peer}", timeout_s, names[peer]).partition(" ")
        if error:
            raise Unmapped(f"rank {names[peer]} cannot map shared memory ({error}); use Gloo on this node")
        pids.append(int(pid))
    return segment, pids


def receive(store: "dist.Store", key: str, timeout_s: float, name: int) -> str:  # type: ignore[name-defined]
    if not wait_for_keys(store, [key], timeout_s):
        message = f"rank {name} did not set up shared memory within {timeout_s:g} s; see its output"
        raise MissingRank(message)
    return str(store.get(key).decode())


OPERATIONS = ("share", "all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
FIELDS = ("operation", "root", "buffer", "elements", "dtype", "scale", "step", "bucket", "layout")

# A rank's words in the control segment.  Adjacent cache lines are fetched in pairs, so words that one rank writes while
# others read are 128 bytes apart.  Two headers are used alternately: a rank that is one operation ahead (it cannot be
# two ahead) must not overwrite a header that a slower rank still compares.
ARRIVED, TAG, LEFT = 0, 1, 3  # number of the barrier; hashes of the two headers; this rank has closed
HEADER, MAILBOX = 16, 48  # two headers of 16 words; words for the peers, see `SharedMemory.share`
WORDS_PER_RANK = 64
PACK_HEADER = struct.Struct(f"{len(FIELDS) - 1}qQ").pack_into

SPINS = 30  # about 3 us
YIELDS = 100
# A yield that returns late gave a computing thread its time slice (5 ms beside a backward pass; a sleep costs 0.02 ms).
# With more ranks than cores but no such thread, yields are three times as fast as sleeps.
LATE_S = 1e-3
# After a late yield the next 2 waits do not yield.  This number doubles with every late yield and halves with every
# prompt one.
MAX_WAITS_WITHOUT_YIELDS = 4096
# A sleep takes a tenth of the wait so far: a long wait uses almost no CPU time and ends at most a tenth late.
# The shortest sleep takes 20 us; with the default timer slack of a thread it would take 80.
MAX_SLEEP_S = 500e-6
PRCTL, PR_SET_TIMERSLACK = getattr(ctypes.CDLL(None), "prctl", None), 29  # Linux has it
LOOK_AFTER_S = 0.1  # after this, check for processes that have died
LONG_LOOK_S = 5.0  # a longer pause between two checks means that this process was stopped
TIMEOUT_S = 600.0


class RankMismatch(RuntimeError):
    """Ranks reached one barrier with different operations."""


class BarrierHeader(Struct, frozen=True):
    """Properties of an operation that the caller knows and all ranks must agree on."""

    step: int = 0
    bucket: int = 0
    layout: int = 0  # a hash of names, shapes and strides: 64 bits, not negative


NO_HEADER = BarrierHeader()


class Barrier:
    """The barrier of this rank and the other ranks on its node."""

    def __init__(
        self,
        store: "dist.Store",  # type: ignore[name-defined]
        rank: int,
        num_ranks: int,
        timeout_s: float,
        names: Sequence[int],
        extra_words: int,  # additional words after those of the ranks, for the caller
    ) -> None:
        self.rank, self.num_ranks, self.timeout_s, self.names = rank, num_ranks, timeout_s, names
        # With fewer cores than ranks the awaited rank may not have one, and spinning would delay it.
        self.spins = SPINS if num_ranks <= len(os.sched_getaffinity(0)) else 0
        self.is_closed = False
        self.waits_until_yield, self.waits_without_yields = 0, 1  # see LATE_S
        self.waited_s = 0.0  # total, at the first barrier of each operation
        self.num_operations = self.num_arrivals = 0
        self.current: tuple[int, ...] = ()
        num_words = WORDS_PER_RANK * num_ranks + extra_words
        self.segment, self.pids = join(store, rank, num_ranks, timeout_s, names, num_words)
        self.words = memoryview(self.segment.numpy())  # type: ignore[arg-type]
        self.own = WORDS_PER_RANK * rank
        self.peers = [WORDS_PER_RANK * peer for peer in range(num_ranks) if peer != rank]
        self.deaths = select.poll()
        self.process_of: dict[int, int] = {}  # file descriptor of a process -> its rank
        for peer, pid in enumerate(self.pids):
            if peer != rank:
                with contextlib.suppress(ProcessLookupError):  # it has already exited; a later wait detects it
                    self.process_of[os.pidfd_open(pid)] = peer
        for descriptor in self.process_of:
            self.deaths.register(descriptor, select.POLLIN)

    def arrive(self, header: tuple[int, ...]) -> None:
        """Wait at the first barrier of an operation, and check that all ranks perform the same one."""
        self.require_open()
        self.current = header
        self.num_operations += 1
        place = self.num_operations & 1
        tag = hash(header)  # a hash of integers is the same in every process
        words, own = self.words, self.own
        PACK_HEADER(words, 8 * (own + HEADER + 16 * place), *header)
        words[own + TAG + place] = tag
        self.wait(is_first=True)
        for peer in self.peers:
            if words[peer + TAG + place] != tag:
                self.raise_mismatch(place)

    def require_open(self) -> None:
        if self.is_closed:
            raise MissingRank("this rank has left the group or lost another rank; join the group again")

    def wait(self, is_first: bool = False) -> None:
        """Wait until all ranks have reached this barrier."""
        words = self.words
        self.num_arrivals = number = self.num_arrivals + 1
        words[self.own + ARRIVED] = number
        for peer in self.peers:
            if words[peer] < number:
                for _ in range(self.spins):
                    if words[peer] >= number:
                        break
                else:
                    began_s = time.perf_counter()
                    self.wait_long(number)
                    if is_first:
                        self.waited_s += time.perf_counter() - began_s
                    return

    def wait_long(self, number: int) -> None:
        words = self.words
        waiting = self.peers
        self.waits_until_yield -= 1
        for turn in range(YIELDS if self.waits_until_yield <= 0 else 0):
            waiting = [peer for peer in waiting if words[peer] < number]
            if not waiting:
                if turn:
                    self.waits_without_yields = max(1, self.waits_without_yields // 2)
                return
            began_s = time.perf_counter()
            os.sched_yield()
            if time.perf_counter() - began_s > LATE_S:
                self.waits_without_yields = min(MAX_WAITS_WITHOUT_YIELDS, 2 * self.waits_without_yields)
                self.waits_until_yield = self.waits_without_yields
                break
        if PRCTL:
            PRCTL(PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # of this thread, in ns
        began_s = looked_s = time.monotonic()
        elapsed_s = 0.0
        while waiting := [peer for peer in waiting if words[peer] < number]:
            time.sleep(min(MAX_SLEEP_S, elapsed_s / 10))
            now_s = time.monotonic()
            if now_s - looked_s > LONG_LOOK_S:  # this process was stopped, perhaps with all others
                began_s += now_s - looked_s
            looked_s = now_s
            elapsed_s = now_s - began_s
            if elapsed_s > LOOK_AFTER_S:
                self.require_open()  # another thread may have closed it
                known = self.process_of
                gone = {known[d] for d, event in self.deaths.poll(0) if event & select.POLLIN and d in known}
                self.require_present("has died", gone, number)
                self.require_present("has left", self.ranks_that_left(), number)
            if elapsed_s > self.timeout_s:
                late = {peer // WORDS_PER_RANK for peer in waiting}
                self.require_present(f"did not arrive within {self.timeout_s:g} s", late, number, LateRank)

    def require_present(
        self, failure: str, ranks: set[int], number: int, kind: type[MissingRank] = MissingRank
    ) -> None:
        # A rank that has exited may have arrived here first.
        missing = sorted(rank for rank in ranks if self.words[WORDS_PER_RANK * rank] < number)
        if missing:
            self.close()  # the other ranks must not use incomplete results
            current = dict(zip(FIELDS, self.current, strict=True))
            operation = describe_header({field: current[field] for field in ("operation", "bucket")})
            raise kind(f"{self.name(missing)} {failure} while the others wait in {operation}")

    def ranks_that_left(self) -> set[int]:
        return {peer // WORDS_PER_RANK for peer in self.peers if self.words[peer + LEFT]}

    def raise_mismatch(self, place: int) -> NoReturn:
        headers: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            begin = WORDS_PER_RANK * rank + HEADER + 16 * place
            headers.setdefault(tuple(self.words[begin : begin + len(FIELDS)]), []).append(rank)
        columns = zip(FIELDS, zip(*headers, strict=True), strict=True)
        differing = {field for field, values in columns if len(set(values)) > 1} | {"operation", "bucket"}
        described = []
        for header, ranks in headers.items():
            fields = {field: value for field, value in zip(FIELDS, header, strict=True) if field in differing}
            described.append(f"{self.name(ranks)} in {describe_header(fields)}")
        raise RankMismatch(
            f"{', '.join(described)}; all ranks must exchange the same tensors in the same order: "
            "look for a condition or a size that depends on the rank"
        )

    def name(self, ranks: Sequence[int]) -> str:
        return name_ranks([self.names[rank] for rank in ranks])

    def close(self) -> None:
        """Notify the ranks that still wait for this one.  No operation may follow."""
        self.is_closed = True
        self.words[self.own + LEFT] = 1
        descriptors, self.process_of = self.process_of, {}
        for descriptor in descriptors:
            os.close(descriptor)


def describe_header(header: dict[str, int]) -> str:
    """Return a text such as: all_reduce of bucket 3, elements 1,024, dtype float32"""
    fields = []
    for field, value in header.items():
        if field == "dtype":
            fields.append(f"dtype {str(DTYPES[value]).removeprefix('torch.')}")
        elif field == "layout":
            fields.append(f"layout {value % 2**64:016x}")
        elif field == "scale":
            fields.append(f"scale {struct.unpack('d', struct.pack('q', value))[0]:g}")
        elif field not in ("operation", "bucket"):
            fields.append(f"{field} {value:,}")
    return ", ".join([f"{OPERATIONS[header['operation']]} of {name_bucket(header['bucket'])}", *fields])
