"""Ctrl-C and SIGTERM: a rank stops after its step, with a checkpoint; and a rank ends when its launcher dies."""

import ctypes
import os
import signal
import threading
from abc import ABC, abstractmethod
from types import FrameType, TracebackType
from typing import Self

from megabatch.text import print_text

LAUNCHER = "MEGABATCH_LAUNCHER"  # the launcher's process id; says that a rank is ours, and whom it must not outlive
PRCTL, PR_SET_PDEATHSIG = getattr(ctypes.CDLL(None), "prctl", None), 1  # Linux has it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """A signal reached the launcher; it has passed it on and all ranks have ended."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Listening(ABC):
    """Hears the signals that ask to stop, until it leaves its `with`; not those that are ignored, as nohup asks."""

    def __init__(self, preempt_signal: int = signal.SIGTERM) -> None:
        self.number: int | None = None  # of the first that came
        self.listens_to = {*STOP_SIGNALS, preempt_signal}

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows nobody to listen
            for number in self.listens_to:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, listener in self.before.items():
            signal.signal(number, listener)

    @abstractmethod
    def receive(self, number: int, frame: FrameType | None) -> None:
        """One of them has come."""


class StopRequest(Listening):
    """In a rank: remembers that a signal came; the trainer asks once a step.  A second one ends at once."""

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and not was_launched():
            raise KeyboardInterrupt  # our launcher ends a rank itself
        self.number = self.number or number

    def received(self) -> bool:
        return self.number is not None

    def exit_code(self) -> int:
        """Where only another rank got the signal, this one does not know which it was."""
        return 128 + (self.number or signal.SIGTERM)


class LauncherSignals(Listening):
    """In the launcher: a first signal asks the ranks to stop after their step, a second ends all at once."""

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            os._exit(128 + number)  # and the kernel kills the ranks: see `die_with`
        self.number = number
        print_text("\nstopping  after this step; once more to end at once")


def was_launched() -> bool:
    """True in a rank that `launch` started."""
    return LAUNCHER in os.environ


def die_with_launcher(parent: int) -> None:
    """Ranks live in a session of their own: without this, a `kill -9` of their launcher would leave them training.

    `parent` is the process that was the parent before anything slow was imported.
    """
    if was_launched() or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(int(os.environ[LAUNCHER]) if was_launched() else parent)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies: more exactly, the thread that has started it."""
    if PRCTL:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
