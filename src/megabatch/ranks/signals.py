"""Ctrl-C and SIGTERM: a rank stops after its step, with a checkpoint; and a rank ends when its launcher dies."""

import ctypes
import os
import shutil
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from torch.distributed.elastic.multiprocessing.api import SignalException

LAUNCHER = "MEGABATCH_LAUNCHER"  # the launcher's process id; says that a rank is ours, and whom it must not outlive
STOP_TIMEOUT_S = 600  # a step, an evaluation or a checkpoint may be under way
FAILURE_TIMEOUT_S = 30  # what a rank gets to end after another one has failed
PRCTL, PR_SET_PDEATHSIG = getattr(ctypes.CDLL(None), "prctl", None), 1  # Linux has it


class Stopped(Exception):
    """Ctrl-C or SIGTERM reached the launcher; it has passed the signal on and all ranks have ended."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class StopRequest:
    """In a rank: remembers that Ctrl-C or SIGTERM came; the trainer asks once a step.  A second one ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows nobody to listen
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, listener in self.before.items():
            signal.signal(number, listener)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and not was_launched():
            raise KeyboardInterrupt  # our launcher ends a rank itself
        if was_launched() and self.number != signal.SIGINT:
            # From our launcher SIGINT means to stop, in good time; SIGTERM that another rank has failed, and then a
            # collective may never return.
            signal.alarm(FAILURE_TIMEOUT_S if number == signal.SIGTERM else 0)
        self.number = number

    def received(self) -> bool:
        return self.number is not None

    def exit_code(self) -> int:
        """Where only another rank got the signal, this one does not know which it was."""
        return 128 + (self.number or signal.SIGTERM)


class LauncherSignals:
    """In the launcher: a first Ctrl-C or SIGTERM asks the ranks to stop after their step, a second ends all at once."""

    def __init__(self, scratch: Path) -> None:
        self.number: int | None = None
        self.scratch = scratch
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            os._exit(128 + number)  # and the kernel kills the ranks: see `die_with_launcher`
        self.number = number
        print("\nstopping  after this step; once more to end at once", flush=True)
        # Ranks get SIGINT either way: a SIGTERM tells them that another rank has failed.
        raise SignalException(f"signal {number}", sigval=signal.SIGINT)


def was_launched() -> bool:
    """True in a rank that `launch` started."""
    return LAUNCHER in os.environ


def die_with_launcher(parent: int) -> None:
    """Ranks live in a session of their own: without this, a `kill -9` of their launcher would leave them training.

    `parent` is the process that was the parent before anything slow was imported.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(int(os.environ[LAUNCHER]) if was_launched() else parent)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies: more exactly, the thread that has started it."""
    if PRCTL:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
