"""Starts ranks on this machine: each runs the same command and finds out which it is.

The launcher holds the store at which they meet and is the only one to speak: the rank that fails first leaves its line
there.  Store and recipe are files that the ranks inherit: they have no port and no name, so nobody else reaches them,
and a launcher that is killed leaves nothing.
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

from megabatch.ranks.failures import FAILURE, RankFailed, Report, describe_end, joined_key
from megabatch.ranks.machine import LOOPBACK, is_stopped, listening_on, usable_cores
from megabatch.ranks.signals import LAUNCHER, LauncherSignals, Stopped
from megabatch.ranks.store import STORE_FILE
from megabatch.telemetry.activity import START_UP_TIMEOUT_S

# The store of a launcher's ranks, as a file in memory that they inherit.
#
# torch's FileStore appends to its file, under a lock: the length of a key, the key, the length of its value, the
# value. A process that is killed in between leaves a part, and whoever reads that waits for the rest, for ever, with
# the lock in hand.  So the launcher reads once its ranks have ended, and mends the file first.


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


COMMAND = "MEGABATCH_COMMAND"  # the variable in which ranks find what the user typed
RECIPE = "{recipe}"  # in the arguments of ranks: the file with the recipe
LOOK_EVERY_S = 0.05
GRACE_S = 5.0  # for ranks to notice that another one has failed, and to end


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    max_restarts: int = 0,
    recipe: str = "",  # its text, for RECIPE
    preempt_signal: signal.Signals = signal.SIGTERM,
    timeout_s: float = START_UP_TIMEOUT_S,  # what a rank that is stopped gets, besides GRACE_S
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs `python -m megabatch ARGUMENTS` as `num_ranks` ranks of this machine, and waits for them.

    Ranks that fail are restarted, so many times; not where the user has made a mistake, or has asked them to stop.
    """
    with own_store() as (store, door), passed_on(recipe) as file, LauncherSignals(preempt_signal) as signals:
        # -P: what lies in the working directory does not shadow what is installed.
        command = [sys.executable, "-P", "-m", "megabatch", *(word.replace(RECIPE, file.path) for word in arguments)]
        for attempt in range(max_restarts + 1):
            for key in (FAILURE, *map(joined_key, range(num_ranks))):
                store.delete_key(key)
            ranks = [start(command, rank, num_ranks, door, file.descriptors) for rank in range(num_ranks)]
            failed = Attempt(ranks, store, signals, timeout_s + GRACE_S, door.mend).wait()
            if failed is None:
                return
            if failed.exit_code != 1 or attempt == max_restarts:
                raise failed
            say(f"rank {failed.rank}: {failed}; restart {attempt + 1} of {max_restarts}")


def start(
    command: Sequence[str], rank: int, num_ranks: int, door: "Door", descriptors: Sequence[int]
) -> "subprocess.Popen[bytes]":
    ours = {
        LAUNCHER: str(os.getpid()),
        COMMAND: shlex.join(["megabatch", *sys.argv[1:]]),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **door.variables,
    }
    defaults = {
        # One thread per core in all: ranks with more than their share of threads slow each other down.
        "OMP_NUM_THREADS": str(max(1, len(usable_cores()) // num_ranks)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does
    }
    return subprocess.Popen(
        command,
        env=defaults | os.environ | ours,
        pass_fds=[*descriptors, *door.descriptors],
        start_new_session=True,  # Ctrl-C reaches us alone
    )


def nothing() -> None:
    pass


class Attempt:
    """Ranks that have been started, until all have ended."""

    def __init__(
        self,
        ranks: Sequence["subprocess.Popen[bytes]"],
        store: Any,
        signals: LauncherSignals,
        stop_s: float = START_UP_TIMEOUT_S,  # that a rank may be stopped for
        mend: Callable[[], object] = nothing,  # the store, of which ranks that were killed may have left a part
    ) -> None:
        self.ranks, self.store, self.signals, self.stop_s, self.mend = ranks, store, signals, stop_s, mend
        self.stopped: Report | None = None  # of one that was stopped for longer
        self.first: Ended | None = None  # that did not end well
        self.deadline_s = 0.0  # for the others
        self.was_passed_on = False  # the signal
        # Looks at which a rank was stopped; and not the time, which goes on for a launcher that is stopped with it.
        self.looks: Counter[int] = Counter()

    def wait(self) -> RankFailed | None:
        """What the first that failed has to say.  `Stopped`, if they have done as they were asked."""
        while running := [rank for rank in self.ranks if rank.poll() is None]:
            self.pass_signal_on(running)
            self.end_stopped(running)
            self.end_others(running)
            time.sleep(LOOK_EVERY_S)
        first = self.first or first_to_end([rank.returncode for rank in self.ranks])
        if first is None:
            return None
        self.mend()  # now that nobody writes
        reported = read_report(self.store) or self.stopped
        # A rank that was killed is the cause of whatever others have reported.
        if reported and (first.exit_code >= 0 or reported.rank == first.rank):
            return RankFailed(reported.rank, reported.exit_code, reported.message, reported.trace)
        if self.signals.number is not None:
            raise Stopped(self.signals.number)
        exit_code = first.exit_code if is_stop(first.exit_code) else 1
        starting = "" if self.store.check([joined_key(first.rank)]) else " while it was starting"
        return RankFailed(first.rank, exit_code, describe_end(first.exit_code, starting))

    def pass_signal_on(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        if self.signals.number is not None and not self.was_passed_on:
            self.was_passed_on = True
            for rank in running:
                rank.send_signal(self.signals.number)

    def end_stopped(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Those for which others have waited long enough, and may not have begun to: nothing else notices them."""
        self.looks = Counter({rank.pid: self.looks[rank.pid] + 1 for rank in running if is_stopped(rank.pid)})
        for number, rank in enumerate(self.ranks):
            if self.looks[rank.pid] * LOOK_EVERY_S > self.stop_s:
                rank.kill()
                message = f"its process was stopped for {self.stop_s:g} s, by a signal such as SIGSTOP"
                self.stopped = self.stopped or Report(number, 1, message)

    def end_others(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Of one that has failed: most notice it themselves."""
        self.first = self.first or first_to_end([rank.returncode for rank in self.ranks])
        if self.first and not is_stop(self.first.exit_code):
            self.deadline_s = self.deadline_s or time.monotonic() + GRACE_S
            for rank in running:
                if time.monotonic() > self.deadline_s or is_stopped(rank.pid):
                    rank.kill()


class Ended(NamedTuple):
    rank: int
    exit_code: int


def first_to_end(exit_codes: Sequence[int | None]) -> Ended | None:
    """Of ranks that have not ended well.  One that was killed comes first: others follow it within moments."""
    failed = [Ended(rank, code) for rank, code in enumerate(exit_codes) if code]
    return min(failed, key=lambda ended: ended.exit_code > 0, default=None)


def is_stop(exit_code: int) -> bool:
    """Of a rank that was asked to stop: the others may still be writing a checkpoint."""
    return exit_code > 128


def read_report(store: Any) -> Report | None:
    try:
        return msgspec.json.decode(store.get(FAILURE), type=Report) if store.check([FAILURE]) else None
    except msgspec.DecodeError:  # nothing that a rank of ours has written
        return None


class Door(NamedTuple):
    """How ranks reach the launcher's store: what they find in their environment, and inherit."""

    variables: dict[str, str]
    descriptors: tuple[int, ...] = ()
    mend: Callable[[], object] = nothing  # removes what a rank that was killed was writing there


def own_store() -> AbstractContextManager[tuple[Any, Door]]:
    return file_store() if hasattr(os, "memfd_create") else loopback_store()


@contextmanager
def file_store() -> Iterator[tuple[Any, Door]]:
    """A store in memory that this process and those that inherit it can open, through /proc, and no other user.

    Behind a port, even of the loopback interface, every user of this machine could read and write all of it: it is
    what says where the others' memory, sockets and the run's folder are.  A request takes 10 us, as over TCP.
    """
    descriptor = make_store_file()
    path = f"/dev/fd/{descriptor}"
    store = dist.FileStore(path, -1)  # type: ignore[attr-defined]
    yield store, Door({STORE_FILE: path}, (descriptor,), mend=partial(mend, descriptor))


@contextmanager
def loopback_store() -> Iterator[tuple[Any, Door]]:
    """A store that only this machine reaches; where no file can be inherited without a name, as on macOS."""
    listener = listening_on(LOOPBACK, 0)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore(LOOPBACK, port, **options)  # type: ignore[attr-defined]
    yield store, Door({"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)})


class PassedOn(NamedTuple):
    """A file of no name, for the ranks to inherit."""

    path: str
    descriptors: tuple[int, ...]


@contextmanager
def passed_on(text: str) -> Iterator[PassedOn]:
    with TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        yield PassedOn(f"/dev/fd/{file.fileno()}", (file.fileno(),))
