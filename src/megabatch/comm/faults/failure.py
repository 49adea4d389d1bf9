"""The first error of this rank: the rank aborts, reports it to the other ranks, and reads their reports.

DDP would turn an error in the hook or its threads into a cast error, so the error is kept here and raised at the end of
backward.  The watchdog detects a training thread that is stuck or, on an accelerator, blocked by a device that waits
for other ranks.  Then the collectives are ended and the error is raised in the training thread.  If that thread does
not leave, the error is printed and the process ends.
"""

import re
import threading

import torch.distributed as dist

from megabatch.comm.accelerator.stream_times import Collective
from megabatch.comm.cpu.barrier import BarrierHeader, LateRank, MissingRank, RankMismatch
from megabatch.comm.faults.watchdog import WAITS, Watchdog
from megabatch.comm.groups import Groups
from megabatch.comm.layouts import BucketLayouts
from megabatch.errors import UserError
from megabatch.planning.topology import Axis
from megabatch.ranks.failures import PeerFailed
from megabatch.telemetry.timeline import name_bucket

LEFT_WITHIN_S = 10.0  # for the training thread to leave after a hang; then the process ends


class Stuck(RuntimeError):
    """This rank is stuck outside a collective."""


class UnknownMissingRank(MissingRank):
    """Ranks did not arrive at a collective on the device, which does not know the ranks."""


def is_backend_error(error: BaseException) -> bool:
    """Return whether Gloo or NCCL, which do not name ranks, raised this error."""
    return type(error) is RuntimeError or isinstance(error, dist.DistBackendError)


def quote_backend(error: BaseException) -> str:
    """Return the first sentence of the backend's error, without the line of its source."""
    # [/source/file.cc:553] Connection closed by peer. Explanations.
    line = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    return f"network error: {line}"


class FirstError:
    """The first error of this rank, after which nothing is exchanged."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.has_failed = False  # `error` is set later, when `explain` returns
        self.has_left = threading.Event()  # the training thread has left, or the all-reduce is closed

    def record(self, error: BaseException, header: BarrierHeader, axis: Axis) -> None:
        if not self.has_failed:
            self.has_failed = True
            self.error = self.explain(error, header, axis)

    def explain(self, error: BaseException, header: BarrierHeader, axis: Axis) -> BaseException:
        return error

    def close(self) -> None:
        """Make every later backward raise."""
        self.has_left.set()
        if not self.has_failed:
            self.has_failed = True
            self.error = UserError("backward ran after its all-reduce was closed; close it after the last backward")

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class FailureHandler(FirstError):
    """The first error with the reports of other ranks.  This rank aborts and reports its reason to them."""

    def __init__(self, groups: Groups, layouts: BucketLayouts, watchdog: Watchdog) -> None:
        super().__init__()
        self.groups, self.layouts, self.watchdog = groups, layouts, watchdog
        self.on_accelerator = groups.device.type != "cpu"
        watchdog.on_hang, watchdog.on_stuck = self.handle_hang, self.handle_stuck

    def record(self, error: BaseException, header: BarrierHeader, axis: Axis) -> None:
        super().record(error, header, axis)
        if self.on_accelerator:
            self.groups.abort()

    def explain(self, error: BaseException, header: BarrierHeader, axis: Axis) -> BaseException:
        """Abort, report the error to the other ranks, and return it with their reports."""
        knows_rank, is_late = True, isinstance(error, LateRank)
        if is_late:
            error = MissingRank(str(error))
        if isinstance(error, UnknownMissingRank):
            error, knows_rank = MissingRank(str(error)), False
        if is_backend_error(error):
            error, knows_rank = MissingRank(quote_backend(error)), False
        # A rank that waits for others is not the cause.
        self.watchdog.report_final(WAITS if isinstance(error, MissingRank) else f"has aborted: {error}")
        if not self.on_accelerator:  # there the others do not notice, and `record` aborts after this report
            self.groups.abort()
        step = header.step + self.watchdog.progress.first_step
        parts = [f"step {step}, {name_bucket(header.bucket)}: {error}"]
        if isinstance(error, RankMismatch):
            members = self.groups.topology.members(axis, self.groups.rank)
            parts += self.watchdog.differences(self.layouts.text(header.bucket), members)
        elif isinstance(error, MissingRank):
            # The watchdog of a late rank reports its activity earlier, unless the machine is busy.
            parts += self.groups.stopped_ranks() or self.watchdog.peer_reports(not knows_rank, is_late)
        return type(error)("; ".join(parts)) if isinstance(error, RuntimeError) else error

    def explain_collective(self, error: BaseException) -> BaseException:
        """Return the error of a collective outside the all-reduce of gradients, with the lost ranks."""
        if self.has_failed or not is_backend_error(error):
            return self.error or error
        self.has_failed = True
        self.watchdog.report_final(WAITS)
        self.groups.abort()
        parts = [f"{self.watchdog.activity.where}: {quote_backend(error)}"]
        parts += self.groups.stopped_ranks() or self.watchdog.peer_reports(waits_for_all=True)
        self.error = MissingRank("; ".join(parts))
        return self.error

    def handle_hang(self, collective: Collective, why: str) -> None:
        """End a collective on the device whose ranks are missing.  The watchdog's thread calls it."""
        if not self.has_failed:
            self.has_failed = True
            error = UnknownMissingRank(f"{why} at {collective.phase}")
            self.end_training(self.explain(error, collective.header, collective.phase.axis))

    def handle_stuck(self, waits: bool, patience_s: float) -> None:
        """End a training thread that is stuck or waits for missing ranks.  The watchdog's thread calls it."""
        if self.has_failed:
            return
        self.has_failed = True
        activity = self.watchdog.activity
        error: RuntimeError
        if waits:
            self.watchdog.report_final(WAITS)
            parts = [f"other ranks did not arrive within {patience_s:g} s at {activity.where}"]
            parts += self.groups.stopped_ranks() or self.watchdog.peer_reports(waits_for_all=True)
            error = MissingRank("; ".join(parts))
        else:
            error = Stuck(f"{self.watchdog.describe()}: longer than comm.timeout_s={activity.timeout_s:g} allows")
            self.watchdog.report_final(f"has aborted: {error}")
        self.end_training(error)

    def end_training(self, error: BaseException) -> None:
        """Raise the error in the training thread.  If that thread does not leave, end the process."""
        self.error = error
        self.watchdog.exit_reporter.announce(error)  # before anything that may block
        self.watchdog.log_stack()
        if self.on_accelerator:
            self.watchdog.activity.interrupt(error)  # before it reads results of collectives that were aborted
            self.groups.abort_all()
        else:
            self.groups.abort()
            self.watchdog.activity.interrupt(error)
        if not self.has_left.wait(LEFT_WITHIN_S):
            self.watchdog.exit_reporter.end_process(error)

    def leave(self, error: BaseException) -> None:
        """This rank leaves because of an error elsewhere."""
        self.has_left.set()
        if isinstance(error, PeerFailed):
            self.watchdog.report_final(WAITS)
        elif error is not self.error:
            self.watchdog.report_final(f"has aborted: {type(error).__name__}: {error}")
        if self.on_accelerator:  # collectives in flight may never end
            self.groups.abort()
