"""What ranks write to the store when a run is about to fail: where they stand, why they abort, how their buckets lie.

All ranks may fail at once, and one store serves them: each asks it a few dozen times, however many ranks there are.
    host/<rank>      where it runs, before anything fails
    state/<rank>     there, while the rank has written anything
    states           how many are there
    messages         how many ranks have ever had more to say than that they wait
    message/<n>      what the n-th of these has to say, [rank, text]; text is "" once it is true no longer
"""

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megabatch.comm.progress import WAITS
from megabatch.ranks.store import first_absent

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
