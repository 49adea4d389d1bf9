"""Start ranks on this machine. Each runs the same command and reads its rank from the environment.

The launcher owns the store through which ranks connect, and only the launcher prints: the first rank to fail leaves its
message in the store.  Store and recipe are files that the ranks inherit.  They have no port and no name, so no other
process can open them, and a launcher that is killed leaves no files.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from megabatch.ranks.failures import FAILURE, RankFailed, RankFailureReport, describe_exit, joined_key
from megabatch.ranks.machine import LOOPBACK, is_stopped, listen_on, usable_cores
from megabatch.ranks.signals import LAUNCHER, LauncherSignals, Stopped
from megabatch.ranks.store import STORE_FILE
from megabatch.telemetry.activity import START_UP_TIMEOUT_S

# The store is a file in memory that the ranks inherit.
#
# torch's FileStore appends to its file, under a lock: the length of a key, the key, the length of its value, the
# value.  A process that is killed while it writes leaves a partial entry, and the next reader waits forever for the
# rest, holding the lock.  So the launcher reads only after its ranks have ended, and truncates the file first.


def create_store_file() -> int:
    """Return a file descriptor that is never closed: a store's destructor opens it by its number."""
    return os.memfd_create("megabatch-store")


def drop_partial_entry(descriptor: int) -> bool:
    """Truncate the file after its last complete entry; return whether that removed anything. No process may write."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole = max(entry_ends(content), default=0)
    os.ftruncate(descriptor, whole)
    return whole < len(content)


def entry_ends(content: bytes) -> Iterator[int]:
    """Yield the end of each complete entry, up to the first that is not one."""
    begin = 0
    while begin < len(content):
        key, end = read_sized(content, begin)
        value, end = read_sized(content, end)
        # Keys are printable and lengths are not, so a length that is read as a key is recognised.
        if not key or value is None or not key.decode("ascii", "replace").isprintable():
            return
        yield end
        begin = end


def read_sized(content: bytes, begin: int) -> tuple[bytes | None, int]:
    """Return the bytes after a 4-byte length, or None if they are incomplete, and the position after them."""
    length = int.from_bytes(content[begin : begin + 4], "little")
    text = content[begin + 4 : begin + 4 + length]
    is_whole = begin + 4 <= len(content) and len(text) == length
    return (text if is_whole else None), begin + 4 + length


COMMAND = "MEGABATCH_COMMAND"  # the variable with the command line of the user
RECIPE = "{recipe}"  # a placeholder in the arguments of ranks: the path of the recipe
POLL_INTERVAL_S = 0.05
GRACE_S = 5.0  # for ranks to detect that another one has failed, and to end


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    max_restarts: int = 0,
    recipe: str = "",  # the text of the file that replaces RECIPE
    preempt_signal: signal.Signals = signal.SIGTERM,
    timeout_s: float = START_UP_TIMEOUT_S,  # a rank may be stopped for this long plus GRACE_S
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Run `python -m megabatch ARGUMENTS` as `num_ranks` ranks on this machine, and wait for them.

    If a rank fails, all are restarted, at most `max_restarts` times. Errors of the user and requested stops are final.
    """
    with (
        open_launcher_store() as (store, handle),
        inherited_file(recipe) as file,
        LauncherSignals(preempt_signal) as signals,
    ):
        # -P: files in the working directory do not shadow installed packages.
        command = [sys.executable, "-P", "-m", "megabatch", *(word.replace(RECIPE, file.path) for word in arguments)]
        for attempt in range(max_restarts + 1):
            for key in (FAILURE, *map(joined_key, range(num_ranks))):
                store.delete_key(key)
            ranks = [start_rank(command, rank, num_ranks, handle, file.descriptors) for rank in range(num_ranks)]
            failed = Attempt(ranks, store, signals, timeout_s + GRACE_S, handle.repair).wait()
            if failed is None:
                return
            if failed.exit_code != 1 or attempt == max_restarts:
                raise failed
            log(f"rank {failed.rank}: {failed}; restart {attempt + 1} of {max_restarts}")


def start_rank(
    command: Sequence[str], rank: int, num_ranks: int, handle: "StoreHandle", descriptors: Sequence[int]
) -> "subprocess.Popen[bytes]":
    ours = {
        LAUNCHER: str(os.getpid()),
        COMMAND: shlex.join(["megabatch", *sys.argv[1:]]),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **handle.variables,
    }
    defaults = {
        # One thread per core over all ranks: with more, ranks slow each other down.
        "OMP_NUM_THREADS": str(max(1, len(usable_cores()) // num_ranks)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does
    }
    return subprocess.Popen(
        command,
        env=defaults | os.environ | ours,
        pass_fds=[*descriptors, *handle.descriptors],
        start_new_session=True,  # Ctrl-C reaches only the launcher
    )


def do_nothing() -> None:
    pass


class Attempt:
    """The processes of one attempt, from their start until all have ended."""

    def __init__(
        self,
        ranks: Sequence["subprocess.Popen[bytes]"],
        store: Any,
        signals: LauncherSignals,
        stop_s: float = START_UP_TIMEOUT_S,  # how long a rank may be stopped
        repair: Callable[[], object] = do_nothing,  # the store, after ranks that may have been killed while writing
    ) -> None:
        self.ranks, self.store, self.signals, self.stop_s, self.repair = ranks, store, signals, stop_s, repair
        self.stopped: RankFailureReport | None = None  # the report of a rank that was stopped for longer
        self.first: RankExit | None = None  # the first failure
        self.deadline_s = 0.0  # for the other ranks to end
        self.is_signal_forwarded = False
        # Consecutive polls that found a process stopped.  The clock would also count while the launcher is stopped.
        self.stopped_polls: Counter[int] = Counter()

    def wait(self) -> RankFailed | None:
        """Return the error of the first rank that failed, or None. Raise `Stopped` if ranks stopped as requested."""
        while running := [rank for rank in self.ranks if rank.poll() is None]:
            self.forward_signal(running)
            self.kill_stopped(running)
            self.kill_others(running)
            time.sleep(POLL_INTERVAL_S)
        first = self.first or first_failure([rank.returncode for rank in self.ranks])
        if first is None:
            return None
        self.repair()  # all writers have ended
        reported = read_report(self.store) or self.stopped
        # A rank that was killed is the cause of the errors that others report.
        if reported and (first.exit_code >= 0 or reported.rank == first.rank):
            return RankFailed(reported.rank, reported.exit_code, reported.message, reported.trace)
        if self.signals.number is not None:
            raise Stopped(self.signals.number)
        exit_code = first.exit_code if is_requested_stop(first.exit_code) else 1
        starting = "" if self.store.check([joined_key(first.rank)]) else " while it was starting"
        return RankFailed(first.rank, exit_code, describe_exit(first.exit_code, starting))

    def forward_signal(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        if self.signals.number is not None and not self.is_signal_forwarded:
            self.is_signal_forwarded = True
            for rank in running:
                rank.send_signal(self.signals.number)

    def kill_stopped(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Kill ranks that were stopped for longer than `stop_s`. Other ranks detect them only inside a collective."""
        stopped = [rank.pid for rank in running if is_stopped(rank.pid)]
        self.stopped_polls = Counter({pid: self.stopped_polls[pid] + 1 for pid in stopped})
        for number, rank in enumerate(self.ranks):
            if self.stopped_polls[rank.pid] * POLL_INTERVAL_S > self.stop_s:
                rank.kill()
                message = f"its process was stopped for {self.stop_s:g} s, by a signal such as SIGSTOP"
                self.stopped = self.stopped or RankFailureReport(number, 1, message)

    def kill_others(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Kill the ranks that still run GRACE_S after another one failed. Most detect the failure and end."""
        self.first = self.first or first_failure([rank.returncode for rank in self.ranks])
        if self.first and not is_requested_stop(self.first.exit_code):
            self.deadline_s = self.deadline_s or time.monotonic() + GRACE_S
            for rank in running:
                if time.monotonic() > self.deadline_s or is_stopped(rank.pid):
                    rank.kill()


class RankExit(NamedTuple):
    rank: int
    exit_code: int


def first_failure(exit_codes: Sequence[int | None]) -> RankExit | None:
    """Return the rank that failed first. A rank that was killed precedes the others, which fail because of it."""
    failed = [RankExit(rank, code) for rank, code in enumerate(exit_codes) if code]
    return min(failed, key=lambda ended: ended.exit_code > 0, default=None)


def is_requested_stop(exit_code: int) -> bool:
    """Return whether a rank ended because of a stop signal; the others may still be writing a checkpoint."""
    return exit_code > 128


def read_report(store: Any) -> RankFailureReport | None:
    try:
        return msgspec.json.decode(store.get(FAILURE), type=RankFailureReport) if store.check([FAILURE]) else None
    except msgspec.DecodeError:  # not written by one of our ranks
        return None


class StoreHandle(NamedTuple):
    """The environment variables and file descriptors through which ranks open the launcher's store."""

    variables: dict[str, str]
    descriptors: tuple[int, ...] = ()
    repair: Callable[[], object] = do_nothing  # removes the partial entry of a killed rank


def open_launcher_store() -> AbstractContextManager[tuple[Any, StoreHandle]]:
    return file_store() if hasattr(os, "memfd_create") else loopback_store()


@contextmanager
def file_store() -> Iterator[tuple[Any, StoreHandle]]:
    """Open a store in memory that only this process and processes that inherit it can open, through /proc.

    Every user of the machine can connect to a port, even on the loopback interface, and could change the addresses of
    memory, sockets and the run's folder that the store holds. A request takes 10 us, as over TCP.
    """
    descriptor = create_store_file()
    path = f"/dev/fd/{descriptor}"
    store = dist.FileStore(path, -1)  # type: ignore[attr-defined]
    yield store, StoreHandle({STORE_FILE: path}, (descriptor,), repair=partial(drop_partial_entry, descriptor))


@contextmanager
def loopback_store() -> Iterator[tuple[Any, StoreHandle]]:
    """Open a store on the loopback interface, for systems without memfd_create, such as macOS."""
    listener = listen_on(LOOPBACK, 0)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore(LOOPBACK, port, **options)  # type: ignore[attr-defined]
    yield store, StoreHandle({"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)})


class InheritedFile(NamedTuple):
    """A file without a name that the ranks inherit."""

    path: str
    descriptors: tuple[int, ...]


@contextmanager
def inherited_file(text: str) -> Iterator[InheritedFile]:
    with TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        yield InheritedFile(f"/dev/fd/{file.fileno()}", (file.fileno(),))
