"""The first error of this rank: it aborts, tells the others, and hears what they have to say.

An error in the hook or its threads would reach the user as a cast error of DDP's; so it is kept here, and raised as
itself at the end of backward.  Where the watchdog finds that the thread that trains is stuck, or on an accelerator
blocked by a device that waits for other ranks, it ends the collectives, raises the error in that thread, and if that
does not come back, says it and ends the process.
"""

import re
import threading

import torch.distributed as dist

from megabatch.comm.accelerator.stream_times import Collective
from megabatch.comm.cpu.barrier import Header, MissingRank, RankMismatch
from megabatch.comm.faults.progress import WAITS
from megabatch.comm.faults.watchdog import Watchdog
from megabatch.comm.groups import Groups
from megabatch.comm.layouts import BucketLayouts
from megabatch.errors import UserError
from megabatch.planning.topology import Axis
from megabatch.telemetry.timeline import name_bucket

LEFT_WITHIN_S = 10.0  # after a hang was found; then the process ends


class Stuck(RuntimeError):
    """This rank does not come on, in something of its own."""


class Unanswered(MissingRank):
    """Other ranks did not come to a collective on the device, which does not know which."""


class FirstError:
    """Of this rank: after it nothing is exchanged any more."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.has_failed = False  # the error may still be being explained
        self.has_left = threading.Event()  # the thread that trains has, or nobody will ask

    def record(self, error: BaseException, header: Header, axis: Axis) -> None:
        if not self.has_failed:
            self.has_failed = True
            self.error = self.explain(error, header, axis)

    def explain(self, error: BaseException, header: Header, axis: Axis) -> BaseException:
        return error

    def close(self) -> None:
        """From here on, a backward is a mistake."""
        self.has_left.set()
        if not self.has_failed:
            self.has_failed = True
            self.error = UserError("this all-reduce is closed, and a backward follows; close it after the last")

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


class FailureReport(FirstError):
    """The error, with what the other ranks say.  They will miss this one, and hear why."""

    def __init__(self, groups: Groups, layouts: BucketLayouts, watchdog: Watchdog) -> None:
        super().__init__()
        self.groups, self.layouts, self.watchdog = groups, layouts, watchdog
        self.on_accelerator = groups.device.type != "cpu"
        watchdog.on_hang, watchdog.on_stuck = self.end_hang, self.end_stuck

    def record(self, error: BaseException, header: Header, axis: Axis) -> None:
        super().record(error, header, axis)
        if self.on_accelerator:
            self.groups.abort()

    def explain(self, error: BaseException, header: Header, axis: Axis) -> BaseException:
        """This rank aborts, and tells the others; its error, with what they have said."""
        knows_rank = True
        if isinstance(error, Unanswered):
            error, knows_rank = MissingRank(str(error)), False
        if type(error) is RuntimeError or isinstance(error, dist.DistBackendError):  # the backend's: it knows no ranks
            # [/source/file.cc:553] Connection closed by peer. Explanations.
            line = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
            error, knows_rank = MissingRank(f"the network says: {line}"), False
        # Who misses others is not the cause.
        self.watchdog.say_last(WAITS if isinstance(error, MissingRank) else f"has aborted: {error}")
        if not self.on_accelerator:  # there the others notice nothing, and collectives end when this is known
            self.groups.abort()
        step = header.step + self.watchdog.progress.first
        said = [f"step {step}, {name_bucket(header.bucket)}: {error}"]
        if isinstance(error, RankMismatch):
            members = self.groups.topology.members(axis, self.groups.rank)
            said += self.watchdog.differences(self.layouts.text(header.bucket), members)
        elif isinstance(error, MissingRank):
            said += self.groups.stopped_ranks() or self.watchdog.heard(waits_for_all=not knows_rank)
        return type(error)("; ".join(said)) if isinstance(error, RuntimeError) else error

    def end_hang(self, collective: Collective, why: str) -> None:
        """In the watchdog's thread: the device waits for ranks that do not come, and maybe the host for the device."""
        if not self.has_failed:
            self.has_failed = True
            error = Unanswered(f"{why} to {collective.phase}")
            self.end_training(self.explain(error, collective.header, collective.phase.axis))

    def end_stuck(self, waits: bool, patience_s: float) -> None:
        """In the watchdog's thread: the thread that trains does not come on, or waits for ranks that do not come."""
        if self.has_failed:
            return
        self.has_failed = True
        activity = self.watchdog.activity
        error: RuntimeError
        if waits:
            self.watchdog.say_last(WAITS)
            said = [f"other ranks did not come within {patience_s:g} s to {activity.where}"]
            said += self.groups.stopped_ranks() or self.watchdog.heard(waits_for_all=True)
            error = MissingRank("; ".join(said))
        else:
            error = Stuck(f"{self.watchdog.describe()}: longer than comm.timeout_s={activity.timeout_s:g} allows")
            self.watchdog.say_last(f"has aborted: {error}")
        self.end_training(error)

    def end_training(self, error: BaseException) -> None:
        """Raises it in the thread that trains; if that does not come back to leave with it, the process ends."""
        self.error = error
        self.watchdog.log_stack()
        self.groups.abort()
        self.watchdog.activity.interrupt(error)
        if not self.has_left.wait(LEFT_WITHIN_S):
            self.watchdog.last_words.end(error)

    def leave(self, error: BaseException) -> None:
        """This rank leaves because of an error elsewhere."""
        self.has_left.set()
        if error is not self.error:
            self.watchdog.say_last(f"has aborted: {type(error).__name__}: {error}")
        if self.on_accelerator:  # what is on the way may never end
            self.groups.abort()
