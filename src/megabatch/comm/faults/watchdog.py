"""The watchdog thread of a rank: it finds the rank that keeps the others waiting, and its activity.

After half of the timeout without progress, a rank writes its activity to the store.  When the timeout expires, the
ranks that wait for it can name it and its activity.  A rank that aborts writes its reason.  A rank without any report
hangs as a whole or has exited.  A rank that is stuck outside an all-reduce ends when the timeout expires (`on_stuck`).

On accelerators only this thread notices missing ranks, because the host has issued its collectives and continues or
waits for the device.  The thread queries their events without waiting.  It calls `on_hang` when the device has been in
one collective for the whole timeout, or when meanwhile another rank has aborted or does not answer (`Heartbeats`).
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

from megabatch.comm.accelerator.stream_times import Collective, StreamTimes
from megabatch.comm.layouts import BucketLayouts
from megabatch.io.disk import open_private
from megabatch.ranks.store import first_absent
from megabatch.telemetry.activity import BACKWARD, Activity, ExitReporter
from megabatch.telemetry.timeline import name_bucket
from megabatch.text import MOST_RANKS, listed, name_ranks

WAITS = "waits"  # the report of a rank that only waits for others


class BackwardProgress:
    """The progress of this rank's backward pass, for messages.  Written by the hook, read by the watchdog's thread."""

    def __init__(self, layouts: BucketLayouts, times: StreamTimes | None = None) -> None:
        self.layouts, self.times = layouts, times  # times: of an accelerator's streams
        self.step = 0  # the step whose buckets are being filled, from 0
        self.first_step = 0  # the number of step 0 in messages: steps of the trainer count from 1
        self.reduced: set[int] = set()  # buckets of this step
        # The last bucket of the newest step whose backward is complete here.
        self.last: torch.futures.Future[torch.Tensor] | None = None

    def bucket_has_started(self, index: int, future: torch.futures.Future[torch.Tensor], is_last: bool) -> None:
        self.reduced.add(index)
        if is_last:
            self.last = future
            self.step += 1
            self.reduced = set()

    @property
    def is_waiting(self) -> bool:
        """Return True if this rank waits for others: all buckets of a step have started and are not yet reduced."""
        return self.last is not None and not self.last.done()

    def describe(self) -> str:
        """Return why others wait for this rank, or WAITS if it waits for them.  Does not wait for the device."""
        if self.is_waiting:
            return WAITS
        unfinished = self.times.unfinished() if self.times else None
        if unfinished:
            header = unfinished.header
            bucket = f"{name_bucket(header.bucket)} of step {header.step + self.first_step}"
            return WAITS if unfinished.has_started else f"has issued {bucket}, but its device has not reached it"
        reduced = list(self.reduced)
        missing = self.layouts.missing_from(reduced)
        step = self.step + self.first_step
        return f"has reduced {len(reduced)} buckets of step {step} and has no gradient yet for {listed(missing, 3)}"


# Reports that ranks write to the store when a run fails: their activity, their reason to abort, their bucket layouts.
#
# All ranks may fail at once, with one store.  Each sends it a few dozen requests, for any number of ranks.
#     host/<rank>      the host of the rank, set before anything fails
#     state/<rank>     set while the rank has a report
#     states           number of these
#     messages         number of ranks that ever had a report other than that they wait
#     message/<n>      report of the n-th of these, [rank, text]; text is "" after it is withdrawn

LISTEN_S = 3.0  # time that a failed rank waits for the reports of others
MOST = 3  # ranks quoted in a message
MOST_READ = 12  # reports read, from which those are chosen
SEARCHES = 8  # number of ranks that search for those: the messages of the first to fail are read first


class RankStates:
    """The reports of ranks in the store.  Two threads may write: the watchdog's, and the one that fails."""

    def __init__(self, store: Any, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self.store, self.rank, self.names, self.listen_s = store, rank, names, min(LISTEN_S, timeout_s)
        self.has_written, self.place, self.is_final = False, 0, False  # `place` among the messages, from 1
        self.lock = threading.Lock()
        store.set(f"host/{rank}", platform.node())

    def key(self, rank: int) -> str:
        return f"state/{rank}"

    def write(self, text: str, is_final: bool = False) -> None:
        """Write the report of this rank.  A final report is not overwritten by later ones."""
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
        """Delete the report of this rank, which is no longer true."""
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

    def peer_reports(self, waits_for_all: bool, waits_for_one: bool = False) -> list[str]:
        """Return reports of other ranks.

        With `waits_for_all` every rank has a reason to report: wait for them, and name the ranks that do not.  With
        `waits_for_one` wait for any report.
        """
        try:
            if waits_for_all:
                self.listen(lambda: self.num_silent() == 0)
            elif waits_for_one:
                self.listen(lambda: bool(self.messages()))
            reports = [f"rank {self.names[rank]} {text}" for rank, text in self.messages()]
            silent = self.describe_silent() if waits_for_all else ""
        except RuntimeError:
            address = f" at {os.environ['MASTER_ADDR']}" if "MASTER_ADDR" in os.environ else ""
            return [f"the store{address} is lost: its host is down, or rank 0 or the launcher has exited"]
        return [silent, *reports][:MOST] if silent else reports[:MOST]

    def num_silent(self) -> int:
        return len(self.names) - int(self.store.add("states", 0))

    def messages(self) -> list[tuple[int, str]]:
        """Return some of the reports of other ranks, without those that only wait."""
        last = min(int(self.store.add("messages", 0)), MOST_READ)
        found = [json.loads(self.read(f"message/{place}") or '[0, ""]') for place in range(1, last + 1)]
        return sorted((rank, text) for rank, text in found if text and rank != self.rank)

    def describe_silent(self) -> str:
        count = self.num_silent()
        if not count:
            return ""
        absent = []
        if self.store.add("searches", 1) <= SEARCHES:
            absent = first_absent(self.store, [self.key(rank) for rank in range(len(self.names))], MOST_RANKS)
        ranks = [int(key.partition("/")[2]) for key in absent]
        hosts = sorted({host for rank in ranks if (host := self.read(f"host/{rank}"))})
        on_hosts = f" (on {', '.join(hosts)})" if hosts else ""
        verb = "do" if count > 1 else "does"
        named = name_ranks([self.names[rank] for rank in ranks], count)
        return f"{named} {verb} not respond{on_hosts}: exited or hung"

    def differences(self, layout: str, members: Sequence[int]) -> list[str]:
        """Return the first difference between the bucket layouts of these ranks.  Every member must call this.

        Each compares its layout with that of the first member.  All ranks quote the first difference that is found.
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
                return [
                    f"rank {names[0]} has {describe_parameter(ours)}, rank {names[1]} has {describe_parameter(theirs)}"
                ]
        return []

    def listen(self, is_enough: Callable[[], bool]) -> None:
        """Wait until `is_enough`, with increasing pauses, because all ranks may be asking the store."""
        deadline_s, pause_s = time.perf_counter() + self.listen_s, 0.02
        while not is_enough() and (left_s := deadline_s - time.perf_counter()) > 0:
            time.sleep(min(pause_s, left_s))
            pause_s *= 2

    def read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None


def describe_parameter(parameter: list[Any]) -> str:
    name, dtype, shape, strides = parameter
    return f"{name} {shape} of {dtype.removeprefix('torch.')} with strides {tuple(strides)}"


LOOK_EVERY_S = 2.0  # at most
SILENT_S = 15.0  # a rank on an accelerator is lost if it does not answer for this time, while others wait for it
LEAST_PAUSE_S = 1.0  # between two looks; on a busy machine, shorter ones do not mean that the process was stopped
GRACE_S = 5.0  # a waiting rank gives the all-reduce, or the rank that it waits for, this time to report the cause
MOST_STACKS = 16  # ranks whose stacks are logged
ABORTED = "aborted"  # store key: a rank has aborted


class Heartbeats:
    """A rank whose device waits asks the next rank for a heartbeat, and that rank's watchdog answers.

    While devices do not wait for long, nothing is written: a launcher's store appends every value to a file in memory.

        asked/<rank>   the number of the last question to this rank
        beat/<rank>    the number of the last question that this rank answered; 0 from its start
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.store = store
        self.asked, self.beat = f"asked/{rank}", f"beat/{rank}"
        self.next_asked, self.next_beat = (f"{kind}/{(rank + 1) % num_ranks}" for kind in ("asked", "beat"))
        self.answered, self.has_next_started = "0", False
        self.num_asked, self.asked_s = 0, 0.0

    def start(self) -> None:
        self.store.set(self.beat, self.answered)

    def answer(self) -> None:
        """Answer the question of the previous rank, if there is one."""
        if self.answered != "0" or self.store.check([self.asked]):
            question = self.store.get(self.asked).decode()
            if question != self.answered:
                self.answered = question
                self.store.set(self.beat, question)

    def silent_s(self, now_s: float) -> float:
        """Ask the next rank, and return how long it has not answered.  A rank that has not started is not asked."""
        self.has_next_started = self.has_next_started or self.store.check([self.next_beat])
        if not self.has_next_started:
            return 0.0
        if self.store.get(self.next_beat).decode() == str(self.num_asked):
            self.num_asked, self.asked_s = self.num_asked + 1, now_s
            self.store.set(self.next_asked, str(self.num_asked))
        return now_s - self.asked_s


class Watchdog:
    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[int],
        activity: Activity,
        progress: BackwardProgress,
        exit_reporter: ExitReporter,
        set_timeout: Callable[[float], None] = lambda seconds: None,  # of all-reduces
    ) -> None:
        self.store, self.rank, self.activity, self.progress = store, rank, activity, progress
        self.names, self.exit_reporter, self.set_timeout = names, exit_reporter, set_timeout
        self.states = RankStates(store, rank, names, activity.patience_s)
        self.on_hang: Callable[[Collective, str], None] = lambda collective, why: None
        self.on_stuck: Callable[[bool, float], None] = lambda waits, patience_s: None
        self.waiting: Collective | None = None  # the collective that the device was in at the last check
        self.waiting_since_s = 0.0
        self.looked_s = time.perf_counter()
        self.reported_s: float | None = None  # the time of the last progress, if it is reported in the store
        self.heartbeats = Heartbeats(store, rank, len(names))
        self.stacks: TextIO | None = None  # the file for all stacks, used if this thread cannot run
        activity.note_progress()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="megabatch watchdog", daemon=True)
        self.thread.start()

    def watch(self) -> None:
        times = self.progress.times
        if times:
            torch.accelerator.set_device_index(times.device.index)  # for this thread, which queries events
        with suppress(RuntimeError):  # the store is lost with the rank that held it
            if times:
                self.heartbeats.start()
            while not self.ended.wait(min(self.activity.patience_s / 8, LOOK_EVERY_S)):
                self.look()
        if self.stacks:
            faulthandler.cancel_dump_traceback_later()
            self.stacks.close()

    def look(self) -> None:
        patience_s, now_s = self.activity.patience_s, time.perf_counter()
        if now_s - self.looked_s > min(LOOK_EVERY_S + GRACE_S, max(patience_s / 2, LEAST_PAUSE_S)):
            self.activity.note_progress()  # this process was stopped, perhaps with all others
        self.looked_s = now_s
        self.set_timeout(patience_s)
        self.arm_stacks(patience_s)
        why = self.look_at_device(patience_s)
        if why and self.waiting:
            self.on_hang(self.waiting, why)
            return
        seen_s = self.activity.changed_s
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
        """Return True if this rank waits for other ranks."""
        return self.activity.waits or self.progress.is_waiting

    def describe(self) -> str:
        """Return the activity of this rank and its missing gradients, or WAITS if it only waits for other ranks."""
        if self.waits:
            return WAITS
        if not self.activity.is_followed:
            return self.progress.describe()
        lacks = f" and {self.progress.describe()}" if self.activity.what == BACKWARD else ""
        return f"{self.activity.describe()}{lacks}"

    def arm_stacks(self, patience_s: float) -> None:
        """Log all stacks if this thread cannot run for `patience_s`, because another thread holds the GIL."""
        path = None if self.stacks else self.exit_reporter.log_path()
        if path:
            with suppress(OSError):
                self.stacks = open_private(path)
        if self.stacks:
            faulthandler.dump_traceback_later(patience_s, file=self.stacks)

    def look_at_device(self, patience_s: float) -> str | None:
        """Return the reason why the current collective of the device cannot complete, or None."""
        if not self.progress.times:
            return None
        waiting, now_s = self.progress.times.waiting(), time.perf_counter()
        try:
            self.heartbeats.answer()
            if waiting is None or waiting is not self.waiting:
                self.waiting, self.waiting_since_s = waiting, now_s
                return None
            if now_s - self.waiting_since_s > patience_s:
                return f"other ranks did not arrive within {patience_s:g} s"
            silent_s = self.heartbeats.silent_s(now_s)
            if silent_s > SILENT_S:
                self.store.set(ABORTED, "")
                name = self.names[(self.rank + 1) % len(self.names)]
                return f"rank {name} has sent no heartbeat for {silent_s:.0f} s and did not arrive"
            return "another rank has aborted and did not arrive" if self.store.check([ABORTED]) else None
        except RuntimeError:  # the store is lost with the rank that held it
            self.waiting = waiting
            return "the rank that held the store is lost and did not arrive"

    def log_stack(self) -> None:
        """Log the stack of the training thread.  If all ranks are stuck, only some do."""
        with suppress(RuntimeError):
            if self.store.add("stacks", 1) <= MOST_STACKS:
                header = f"rank {self.names[self.rank]} on {platform.node()} in {self.activity.where}"
                self.exit_reporter.log(f"{header}:\n{self.activity.stack()}")

    def report_final(self, message: str) -> None:
        """Write the final report of this rank."""
        self.ended.set()
        with suppress(RuntimeError):
            self.states.write(message, is_final=True)
            if message != WAITS:
                self.store.set(ABORTED, "")

    def peer_reports(self, waits_for_all: bool = False, waits_for_one: bool = False) -> list[str]:
        return self.states.peer_reports(waits_for_all, waits_for_one)

    def differences(self, layout: str, members: Sequence[int]) -> list[str]:
        return self.states.differences(layout, members)

    def close(self) -> None:
        self.ended.set()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=10)
