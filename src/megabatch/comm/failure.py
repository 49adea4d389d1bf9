"""The first error of this rank: it aborts, tells the others, and hears what they have to say.

An error in the hook or its threads would reach the user as a cast error of DDP's; so it is kept here, and raised as
itself at the end of backward.
"""

import re

from megabatch.comm.barrier import RankMismatch, name_bucket
from megabatch.comm.groups import Groups
from megabatch.comm.layouts import BucketLayouts
from megabatch.comm.progress import WAITS
from megabatch.comm.segment import MissingRank
from megabatch.comm.watchdog import Watchdog
from megabatch.comm.work import Work
from megabatch.errors import UserError
from megabatch.planning.topology import Axis


class FirstError:
    """Of this rank: after it nothing is exchanged any more."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.has_failed = False  # the error may still be being explained

    def record(self, error: BaseException, work: Work, axis: Axis) -> None:
        if not self.has_failed:
            self.has_failed = True
            self.error = self.explain(error, work, axis)

    def explain(self, error: BaseException, work: Work, axis: Axis) -> BaseException:
        return error

    def close(self) -> None:
        """From here on, a backward is a mistake."""
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

    def explain(self, error: BaseException, work: Work, axis: Axis) -> BaseException:
        """This rank aborts, and tells the others; its error, with what they have said."""
        if type(error) is RuntimeError:  # the backend's only one: it knows no ranks
            # [/source/file.cc:553] Connection closed by peer. Explanations.
            line = re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
            error, knows_rank = MissingRank(f"the network says: {line}"), False
        else:
            line, knows_rank = str(error), True
        # Who misses others is not the cause.
        self.watchdog.say_last(WAITS if isinstance(error, MissingRank) else f"has aborted: {line}")
        self.groups.abort()
        said = [f"step {work.header.step}, {name_bucket(work.key)}: {error}"]
        if isinstance(error, RankMismatch):
            members = self.groups.topology.members(axis, self.groups.rank)
            said += self.watchdog.differences(self.layouts.text(work.key), members)
        elif isinstance(error, MissingRank):
            said += self.watchdog.heard(waits_for_all=not knows_rank)
        return type(error)("; ".join(said)) if isinstance(error, RuntimeError) else error

    def leave(self, error: BaseException) -> None:
        """This rank leaves because of an error elsewhere."""
        if error is not self.error:
            self.watchdog.say_last(f"has aborted: {type(error).__name__}: {error}")
