"""Stop signals: a rank saves a checkpoint and stops after its step. A rank is killed when its launcher dies."""

import ctypes
import os
import signal
import threading
from abc import ABC, abstractmethod
from types import FrameType
from typing import Self

from megabatch.text import print_text

LAUNCHER = "MEGABATCH_LAUNCHER"  # the variable with the launcher's process id; only our launcher sets it
PRCTL, PR_SET_PDEATHSIG = getattr(ctypes.CDLL(None), "prctl", None), 1  # None except on Linux
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):
    """The launcher forwarded a signal to its ranks, and all have ended."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class SignalHandler(ABC):
    """Handle stop signals inside a `with` statement. Signals that are ignored, as by nohup, stay ignored."""

    def __init__(self, preempt_signal: int = signal.SIGTERM) -> None:
        self.number: int | None = None  # of the first signal received
        self.handled = {*STOP_SIGNALS, preempt_signal}

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in self.handled:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self.receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @abstractmethod
    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle one of the stop signals."""


class StopRequest(SignalHandler):
    """The handler of a rank. It records a signal, which the trainer checks once per step.

    A second Ctrl-C ends the process. Other signals do not: when a job is cancelled or reaches its time limit, Slurm
    sends SIGTERM twice, perhaps after a warning, while the rank saves.
    """

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT and not was_launched():
            raise KeyboardInterrupt  # the launcher kills its ranks at a second Ctrl-C
        self.number = self.number or number

    def received(self) -> bool:
        return self.number is not None

    def exit_code(self) -> int:
        """Return 128 plus the signal, or plus SIGTERM if only another rank received one."""
        return 128 + (self.number or signal.SIGTERM)


class LauncherSignals(SignalHandler):
    """The handler of the launcher. The first signal stops the ranks after their step, a second Ctrl-C kills them."""

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)  # then the kernel kills the ranks: see `die_with`
            return
        self.number = number
        print_text("\nstopping  after this step; another Ctrl-C ends the run at once")


def was_launched() -> bool:
    """Return whether `launch` started this process."""
    return LAUNCHER in os.environ


def die_with_launcher(parent: int) -> None:
    """Kill this rank when its launcher dies: each rank has a separate session, so it would train on after a `kill -9`.

    `parent` is the parent's process id, read before any slow import.
    """
    if was_launched() or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(int(os.environ[LAUNCHER]) if was_launched() else parent)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, or more exactly, the thread that started it."""
    if PRCTL:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)
