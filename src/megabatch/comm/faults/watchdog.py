"""Who keeps the others waiting, and with what: ranks that have made no progress for long write it to the store.

Half of the timeout without progress, and a rank writes to the store where it stands, unasked; so when the time is up,
the ranks that wait for it can say what it does.  A rank that aborts writes why.  One that has written nothing hangs as
a whole, or is gone.  When the time is up a rank that is stuck outside of an all-reduce ends, too (`on_stuck`).

On accelerators nobody but this thread notices that others do not come: the host has issued its collectives, and goes on
or waits for the device.  So it looks at their events, and never waits for one; when the device has been in the same
collective for the whole of the timeout, or another rank has aborted or is silent meanwhile, it calls `on_hang`.  Ranks
there beat: each writes a number to the store, and listens to the next one.
"""

import faulthandler
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

import torch

from megabatch.comm.accelerator.stream_times import Collective
from megabatch.comm.faults.progress import WAITS, BackwardProgress
from megabatch.io.disk import open_own
from megabatch.ranks.store import first_absent
from megabatch.telemetry.activity import BACKWARD, Activity, LastWords

# What ranks write to the store when a run is about to fail: where they stand, why they abort, how their buckets lie.
#
# All ranks may fail at once, and one store serves them: each asks it a few dozen times, however many ranks there are.
#     host/<rank>      where it runs, before anything fails
#     state/<rank>     there, while the rank has written anything
#     states           how many are there
#     messages         how many ranks have ever had more to say than that they wait
#     message/<n>      what the n-th of these has to say, [rank, text]; text is "" once it is true no longer

LISTEN_S = 3.0  # how long a rank that has failed waits for what the others say
MOST = 3  # ranks that a message quotes
MOST_READ = 12  # messages, of which those are chosen
MOST_NAMED = 8  # ranks that say nothing, in a message
SEARCHES = 8  # ranks that look for those; the first to fail are read first


class RankStates:
    """Two threads may write: the watchdog's, and the one in which this rank fails."""

    def __init__(self, store: Any, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self.store, self.rank, self.names, self.listen_s = store, rank, names, min(LISTEN_S, timeout_s)
        self.has_written, self.place, self.is_final = False, 0, False  # `place` among the messages, from 1
        self.lock = threading.Lock()
        store.set(f"host/{rank}", platform.node())

    def key(self, rank: int) -> str:
        return f"state/{rank}"

    def write(self, text: str, is_final: bool = False) -> None:
        """After the final one, nothing is written any more."""
        with self.lock:
            if self.is_final and not is_final:
                return
            self.is_final = is_final
            if not self.has_written:
                self.store.set(self.key(self.rank), "")
                self.store.add("states", 1)
                self.has_written = True
            self.set_message("" if text == WAITS else text)

    def withdraw(self) -> None:
        """What was written is true no longer."""
        with self.lock:
            if not self.is_final and self.has_written:
                self.store.delete_key(self.key(self.rank))
                self.store.add("states", -1)
                self.has_written = False
                self.set_message("")

    def set_message(self, text: str) -> None:
        if text:
            self.place = self.place or int(self.store.add("messages", 1))
        if self.place:
            self.store.set(f"message/{self.place}", json.dumps([self.rank, text]))

    def heard(self, waits_for_all: bool) -> list[str]:
        """What the other ranks have said; with `waits_for_all` also who says nothing, though all have reason to."""
        try:
            if waits_for_all:
                self.listen(lambda: self.num_silent() == 0)
            said = [f"rank {self.names[rank]} {text}" for rank, text in self.messages()]
            silent = self.describe_silent() if waits_for_all else ""
        except RuntimeError:
            where = f" at {os.environ['MASTER_ADDR']}" if "MASTER_ADDR" in os.environ else ""
            return [f"the store{where} is gone, with its host, rank 0 or the launcher that held it"]
        return [silent, *said][:MOST] if silent else said[:MOST]

    def num_silent(self) -> int:
        return len(self.names) - int(self.store.add("states", 0))

    def messages(self) -> list[tuple[int, str]]:
        """Of other ranks, some of those that have more to say than that they wait."""
        last = min(int(self.store.add("messages", 0)), MOST_READ)
        found = [json.loads(self.read(f"message/{place}") or '[0, ""]') for place in range(1, last + 1)]
        return sorted((rank, text) for rank, text in found if text and rank != self.rank)

    def describe_silent(self) -> str:
        count = self.num_silent()
        if not count:
            return ""
        absent = []
        if self.store.add("searches", 1) <= SEARCHES:
            absent = first_absent(self.store, [self.key(rank) for rank in range(len(self.names))], MOST_NAMED)
        ranks = [int(key.partition("/")[2]) for key in absent]
        hosts = sorted({host for rank in ranks if (host := self.read(f"host/{rank}"))})
        where = f" ({', '.join(hosts)})" if hosts else ""
        return f"{name_some([str(self.names[rank]) for rank in ranks], count)} nothing{where}: gone, or hanging"

    def differences(self, layout: str, members: Sequence[int]) -> list[str]:
        """What first differs in the layouts of a bucket that these ranks have, each of which writes its own.

        Each compares with the first member's, and the first one to find a difference is quoted on all.
        """
        group = f"layouts/{members[0]}-{members[-1]}-{len(members)}"
        first, own, other = (f"{group}/{place}" for place in (members[0], self.rank, "other"))
        try:
            self.store.set(own, layout)
            self.listen(lambda: bool(self.store.check([first])))
            of_first = self.read(first)
            if of_first not in (None, layout) and self.store.add(f"{group}/others", 1) == 1:
                self.store.set(other, str(self.rank))
            self.store.add(f"{group}/compared", 1)
            self.listen(
                lambda: bool(self.store.check([other]) or self.store.add(f"{group}/compared", 0) >= len(members))
            )
            rank = self.read(other)
            of_other = self.read(f"{group}/{rank}") if rank else None
        except RuntimeError:
            return []
        if rank is None or of_first is None or of_other is None:
            return []
        for ours, theirs in zip(json.loads(of_first), json.loads(of_other), strict=False):
            if ours != theirs:
                names = self.names[members[0]], self.names[int(rank)]
                return [f"rank {names[0]} has {describe(ours)}, rank {names[1]} has {describe(theirs)}"]
        return []

    def listen(self, is_enough: Callable[[], bool]) -> None:
        """Asks less and less often: all ranks may be asking."""
        deadline_s, pause_s = time.monotonic() + self.listen_s, 0.02
        while not is_enough() and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s *= 2

    def read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None


def name_some(names: Sequence[str], count: int) -> str:
    """Of so many ranks, the names of some, or of none."""
    if not names:
        return f"{count:,} rank{'s say' if count > 1 else ' says'}"
    more = f" and {count - len(names):,} more" if count > len(names) else ""
    return f"ranks {', '.join(names)}{more} say" if count > 1 else f"rank {names[0]} says"


def describe(parameter: list[Any]) -> str:
    name, dtype, shape, strides = parameter
    return f"{name} {shape} of {dtype.removeprefix('torch.')} with strides {tuple(strides)}"


LOOK_EVERY_S = 2.0  # at most
SILENT_S = 15.0  # a rank on an accelerator that does not beat for so long, while others wait for it, is gone
GRACE_S = 5.0  # whoever waits leaves it to the all-reduce, or the rank that it waits for, to say what is wrong
MOST_STACKS = 16  # of ranks, in the log
ABORTED = "aborted"  # a key of the store: some rank has


class Watchdog:
    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[int],
        activity: Activity,
        progress: BackwardProgress,
        last_words: LastWords,
        set_timeout: Callable[[float], None] = lambda seconds: None,  # of all-reduces
    ) -> None:
        self.store, self.rank, self.activity, self.progress = store, rank, activity, progress
        self.names, self.last_words, self.set_timeout = names, last_words, set_timeout
        self.states = RankStates(store, rank, names, activity.patience_s)
        self.on_hang: Callable[[Collective, str], None] = lambda collective, why: None
        self.on_stuck: Callable[[bool, float], None] = lambda waits, patience_s: None
        self.waiting: Collective | None = None  # in which the device was when it was last looked at
        self.waiting_since_s = 0.0
        self.looked_s = time.monotonic()
        self.reported_s: float | None = None  # when progress ended, of which the store knows
        self.num_beats, self.next_beat, self.next_beat_s = 0, "", time.monotonic()
        self.stacks: TextIO | None = None  # where they go if this thread cannot run
        progress.restart_clock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="megabatch watchdog", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        times = self.progress.times
        if times:
            torch.accelerator.set_device_index(times.device.index)  # of this thread, which asks for events
        with suppress(RuntimeError):  # the store is gone, with the rank that held it
            if times:
                self.beat(time.monotonic())
            while not self.ended.wait(min(self.activity.patience_s / 8, LOOK_EVERY_S)):
                self.look()
        if self.stacks:
            faulthandler.cancel_dump_traceback_later()
            self.stacks.close()

    def look(self) -> None:
        patience_s, now_s = self.activity.patience_s, time.monotonic()
        if now_s - self.looked_s > LOOK_EVERY_S + GRACE_S:  # this process was stopped, perhaps with all others
            self.progress.restart_clock()
        self.looked_s = now_s
        self.set_timeout(patience_s)
        self.arm_stacks(patience_s)
        why = self.look_at_device(patience_s)
        if why and self.waiting:
            self.on_hang(self.waiting, why)
            return
        seen_s = max(self.progress.changed_s, self.activity.since_s)
        if self.reported_s is not None and seen_s != self.reported_s:
            self.reported_s = None
            self.states.withdraw()
        if self.reported_s is None and now_s - seen_s > patience_s / 2:
            self.reported_s = seen_s
            self.states.write(self.describe())
        if self.activity.steps_run and self.waiting is None:
            late_s = now_s - seen_s - patience_s
            if late_s > (GRACE_S if self.waits else 0.0):
                self.on_stuck(self.waits, patience_s)

    @property
    def waits(self) -> bool:
        """For other ranks."""
        return self.activity.waits or self.progress.is_waiting

    def describe(self) -> str:
        """What this rank lacks or does; WAITS if it lacks nothing but other ranks."""
        if self.waits:
            return WAITS
        if not self.activity.is_followed:
            return self.progress.describe()
        lacks = f" and {self.progress.describe()}" if self.activity.what == BACKWARD else ""
        return f"{self.activity.describe()}{lacks}"

    def arm_stacks(self, patience_s: float) -> None:
        """Should this thread not run for so long, because another one keeps the GIL, the log gets all their stacks."""
        path = None if self.stacks else self.last_words.log_path()
        if path:
            with suppress(OSError):
                self.stacks = open_own(path)
        if self.stacks:
            faulthandler.dump_traceback_later(patience_s, file=self.stacks)

    def look_at_device(self, patience_s: float) -> str | None:
        """Why nothing more is to be expected of the collective that the device is in, if so."""
        if not self.progress.times:
            return None
        waiting, now_s = self.progress.times.waiting(), time.monotonic()
        try:
            self.beat(now_s)
            if waiting is None or waiting is not self.waiting:
                self.waiting, self.waiting_since_s = waiting, now_s
                return None
            if now_s - self.waiting_since_s > patience_s:
                return f"other ranks did not come within {patience_s:g} s"
            silent_s = now_s - max(self.next_beat_s, self.waiting_since_s)
            if self.next_beat and silent_s > SILENT_S:
                self.store.set(ABORTED, "")
                return (
                    f"rank {self.names[self.next_rank]} has not been heard of for {silent_s:.0f} s, and does not come"
                )
            return "another rank has aborted, and does not come" if self.store.check([ABORTED]) else None
        except RuntimeError:  # the store is gone, with the rank that held it
            self.waiting = waiting
            return "the rank that held the store does not come"

    @property
    def next_rank(self) -> int:
        return (self.rank + 1) % len(self.names)

    def beat(self, now_s: float) -> None:
        self.num_beats += 1
        self.store.set(f"beat/{self.rank}", str(self.num_beats))
        key = f"beat/{self.next_rank}"
        if self.next_beat or self.store.check([key]):
            beat = self.store.get(key).decode()
            if beat != self.next_beat:
                self.next_beat, self.next_beat_s = beat, now_s

    def log_stack(self) -> None:
        """Of the thread that trains, for the run's log: some of all ranks, where all are stuck."""
        with suppress(RuntimeError):
            if self.store.add("stacks", 1) <= MOST_STACKS:
                where = f"rank {self.names[self.rank]} on {platform.node()} in {self.activity.where}"
                self.last_words.log(f"{where}:\n{self.activity.stack()}")

    def say_last(self, message: str) -> None:
        """The last that this rank writes."""
        self.ended.set()
        with suppress(RuntimeError):
            self.states.write(message, is_final=True)
            if message != WAITS:
                self.store.set(ABORTED, "")

    def heard(self, waits_for_all: bool = False) -> list[str]:
        """What the other ranks have said; with `waits_for_all` also who says nothing, though all have reason to."""
        return self.states.heard(waits_for_all)

    def differences(self, layout: str, members: Sequence[int]) -> list[str]:
        """What first differs in the layouts of a bucket that these ranks have, each of which writes its own."""
        return self.states.differences(layout, members)

    def close(self) -> None:
        self.ended.set()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=10)
