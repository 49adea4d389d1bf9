"""Starts ranks on this machine: each runs the same command and finds out which it is.

The launcher holds the store at which they meet, on the loopback interface alone, and is the only one to speak: the rank
that fails first leaves its line there.  Nothing has a name on the disk, so a launcher that is killed leaves nothing.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from megabatch.ranks.activity import START_UP_TIMEOUT_S
from megabatch.ranks.failures import FAILURE, RankFailed, Report, describe_end
from megabatch.ranks.machine import is_stopped, usable_cores
from megabatch.ranks.signals import LAUNCHER, LauncherSignals, Stopped

RECIPE = "{recipe}"  # in the arguments of ranks: the file with the recipe
LOOK_EVERY_S = 0.05
GRACE_S = 5.0  # for ranks to notice that another one has failed, and to end
LOOPBACK = "127.0.0.1"


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
    with loopback_store() as (store, port), passed_on(recipe) as file, LauncherSignals(preempt_signal) as signals:
        # -P: what lies in the working directory does not shadow what is installed.
        command = [sys.executable, "-P", "-m", "megabatch", *(word.replace(RECIPE, file.path) for word in arguments)]
        for attempt in range(max_restarts + 1):
            store.delete_key(FAILURE)
            ranks = [start(command, rank, num_ranks, port, file.descriptors) for rank in range(num_ranks)]
            failed = Attempt(ranks, store, signals, timeout_s + GRACE_S).wait()
            if failed is None:
                return
            if failed.exit_code != 1 or attempt == max_restarts:
                raise failed
            say(f"rank {failed.rank}: {failed}; restart {attempt + 1} of {max_restarts}")


def start(
    command: Sequence[str], rank: int, num_ranks: int, port: int, descriptors: Sequence[int]
) -> "subprocess.Popen[bytes]":
    ours = {
        LAUNCHER: str(os.getpid()),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    defaults = {
        # One thread per core in all: ranks with more than their share of threads slow each other down.
        "OMP_NUM_THREADS": str(max(1, len(usable_cores()) // num_ranks)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun does
        # All ranks are here: no look-up of the host's name, and no door to the network.
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }
    return subprocess.Popen(
        command,
        env=defaults | os.environ | ours,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C reaches us alone
    )


class Attempt:
    """Ranks that have been started, until all have ended."""

    def __init__(
        self,
        ranks: Sequence["subprocess.Popen[bytes]"],
        store: Any,
        signals: LauncherSignals,
        stop_s: float = START_UP_TIMEOUT_S,  # that a rank may be stopped for
    ) -> None:
        self.ranks, self.store, self.signals, self.stop_s = ranks, store, signals, stop_s
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
        reported = read_report(self.store)
        # A rank that was killed is the cause of whatever others have reported.
        if reported and (first.exit_code >= 0 or reported.rank == first.rank):
            return RankFailed(reported.rank, reported.exit_code, reported.message, reported.trace)
        if self.signals.number is not None:
            raise Stopped(self.signals.number)
        exit_code = first.exit_code if is_stop(first.exit_code) else 1
        return RankFailed(first.rank, exit_code, describe_end(first.exit_code))

    def pass_signal_on(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        if self.signals.number is not None and not self.was_passed_on:
            self.was_passed_on = True
            for rank in running:
                rank.send_signal(self.signals.number)

    def end_stopped(self, running: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Those for which others have waited long enough, and may not have begun to: nothing else notices them."""
        self.looks = Counter({rank.pid: self.looks[rank.pid] + 1 for rank in running if is_stopped(rank.pid)})
        for number, rank in enumerate(self.ranks):
            if self.looks[rank.pid] * LOOK_EVERY_S > self.stop_s and not self.store.check([FAILURE]):
                message = f"its process was stopped for {self.stop_s:g} s, by a signal such as SIGSTOP"
                self.store.set(FAILURE, msgspec.json.encode(Report(number, 1, message)).decode())
                rank.kill()

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
    return msgspec.json.decode(store.get(FAILURE), type=Report) if store.check([FAILURE]) else None


@contextmanager
def loopback_store() -> Iterator[tuple[Any, int]]:
    """A store that only this machine reaches, and its port."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    yield dist.TCPStore(LOOPBACK, port, **options), port  # type: ignore[attr-defined]


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
