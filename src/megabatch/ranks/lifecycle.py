"""What `train` and the benches share: a command that is run once starts ranks, which run the same command."""

import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megabatch.errors import UserError
from megabatch.ranks.signals import die_with_launcher, was_launched
from megabatch.telemetry.activity import LastWords
from megabatch.text import print_line, print_text

if TYPE_CHECKING:
    from megabatch.ranks.discover import RankInfo
    from megabatch.ranks.store import RankStore

# Before torch is imported, which takes seconds.
die_with_launcher(os.getppid())
if was_launched() and threading.current_thread() is threading.main_thread():
    # Until a rank can stop after its step, the signal itself ends it.  An exception may get lost in torch's import, and
    # the launcher would take exit code 130 for a stop after a step and wait for the other ranks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    max_restarts: int = 0,
    recipe: str = "",  # its text; the arguments have RECIPE in its place
    preempt_signal: str = "SIGTERM",
    timeout_s: float = 60.0,
) -> None:
    """Runs `megabatch ARGUMENTS` on `num_ranks` ranks of this machine, and speaks for the one that fails first."""
    from megabatch.ranks.launch import launch

    with speaking_for_ranks():
        launch(arguments, num_ranks, max_restarts, recipe, signal.Signals[preempt_signal], timeout_s, say)


def say(line: str) -> None:
    print_line(f"megabatch: {line}", to_stderr=True)


@contextmanager
def speaking_for_ranks() -> Iterator[None]:
    """Around what starts ranks and waits for them: ends the command as they have ended."""
    from megabatch.ranks.failures import RankFailed
    from megabatch.ranks.signals import Stopped

    try:
        yield
    except Stopped as stopped:
        sys.exit(128 + stopped.signal_number)
    except RankFailed as failed:
        if failed.exit_code > 128:  # it was asked to stop, and has said so
            sys.exit(failed.exit_code)
        rank = "" if failed.exit_code == 2 else f"rank {failed.rank}: "  # a user's mistake is made on all ranks
        print_failure(f"megabatch: {rank}{failed}", failed.trace)
        sys.exit(failed.exit_code)


def be_a_rank(info: "RankInfo", work: Callable[["RankStore"], int]) -> NoReturn:
    """Does the work of one rank.  Of ranks that fail the first alone speaks: to our launcher, or else to the user."""
    from megabatch.ranks.store import RankStore

    store = None
    try:
        store = RankStore(info)
        info = store.info
        store.last_words = RankLastWords(info, store)
        code = work(store)
    except KeyboardInterrupt:  # a second Ctrl-C
        code = 130
    except BaseException as error:
        code = 2 if isinstance(error, UserError) else 1
        # Without a store, all ranks have made the same mistake, or this one alone could not come.
        if store.is_first_to_fail() if store else info.rank == 0 or code != 2:
            speak(error, code, info, store)
    # Everything is closed.  The interpreter's own end would run into Gloo's threads, and sometimes abort.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a file on a disk that is full
            stream.flush()
    os._exit(code)


def speak(error: BaseException, code: int, info: "RankInfo", store: "RankStore | None") -> None:
    """One line; the traceback goes to the run's log, or above the line if there is none that this rank can reach."""
    from megabatch.ranks.failures import Report, report_to_torchrun
    from megabatch.runs.files import LOG
    from megabatch.runs.folder import append_to_log

    first_line = str(error).strip().partition("\n")[0]
    line, trace = (first_line, "") if code == 2 else (f"{type(error).__name__}: {first_line}", traceback.format_exc())
    folder = store.run_folder() if store else None
    is_logged = folder is not None and append_to_log(folder, f"rank {info.rank}: {line}\n{trace}")
    if folder and is_logged and trace:
        line, trace = f"{line} (traceback in {folder / LOG})", ""
    report = Report(info.rank, code, line, trace)
    if was_launched() and store:
        store.report(report)
        return
    report_to_torchrun(report)
    has_rank = code != 2 or info.num_local_ranks != info.num_ranks  # hosts may differ in what they have
    rank = f"rank {info.rank} on {platform.node()}: " if has_rank else ""
    print_failure(f"megabatch: {rank}{line}", trace)


def print_failure(line: str, trace: str) -> None:
    if trace:
        print_text(trace.rstrip("\n"), to_stderr=True)
    print_line(line, to_stderr=True)


class RankLastWords(LastWords):
    def __init__(self, info: "RankInfo", store: "RankStore") -> None:
        super().__init__(info.rank)
        self.info, self.store = info, store

    def speak(self, error: BaseException) -> None:
        if self.store.is_first_to_fail():
            speak(error, 1, self.info, self.store)

    def log(self, text: str) -> None:
        from megabatch.runs.folder import append_to_log

        folder = self.store.run_folder()
        if folder:
            append_to_log(folder, text)

    def log_path(self) -> Path | None:
        from megabatch.runs.files import LOG

        folder = self.store.run_folder()
        return folder / LOG if folder else None
