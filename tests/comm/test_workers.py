"""The prediction of planning.pipeline against the loops of the two workers, with simulated clocks."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import assume, given

from megabatch.comm import phases
from megabatch.comm.cpu.workers import NetworkWorker, NodeWorker
from megabatch.comm.work import RankPhases, Work
from megabatch.planning.pipeline import Costs, Passage, pass_through
from megabatch.telemetry.timeline import BucketPart, Timeline
from tests.support.pipelines import buckets

PLAIN_QUEUE = queue.SimpleQueue


class Clocks(threading.local):
    """Simulated clocks, one per thread, so that an hour of work takes no time."""

    now_s = 0.0


class TimedQueue:
    """A queue that advances the clock of the reader to the time at which the item was put."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.waiting: Any = PLAIN_QUEUE()

    def put(self, work: Work | None) -> None:
        self.waiting.put((self.clocks.now_s, work))

    def empty(self) -> bool:
        return self.waiting.empty()

    def get(self) -> Work | None:
        put_s, work = self.waiting.get()
        self.clocks.now_s = max(self.clocks.now_s, put_s)
        return work


class TimedEvent:
    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.happened = threading.Event()

    def set(self) -> None:
        self.set_s = self.clocks.now_s
        self.happened.set()

    def wait(self) -> None:
        assert self.happened.wait(timeout=10)
        self.clocks.now_s = max(self.clocks.now_s, self.set_s)


class TimedPhases:
    """A stand-in for `PhaseRunner`, in which a phase is its number of seconds."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.spans_s: dict[int, list[float]] = defaultdict(list)

    def scale(self, work: Work) -> None: ...

    def run(self, work: Work, steps: list[Any]) -> None:
        begin_s = self.clocks.now_s
        self.clocks.now_s += sum(steps)
        self.spans_s[work.key] += [begin_s, self.clocks.now_s]


class TimedNetworkWorker(NetworkWorker):
    crossing_s: dict[int, float]

    def stages(self, work: Work) -> Iterator[Callable[[], None]]:
        self.runner.run(work, [self.crossing_s[work.key]])  # type: ignore[list-item]
        yield from ()


class Ends(Timeline):
    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks
        self.ends_s: dict[int, float] = {}

    def note_reduced(self, work: BucketPart) -> None:
        self.ends_s[work.key] = self.clocks.now_s


def run_step(ready_s: list[float], costs: list[Costs]) -> list[Passage]:
    """Run the loops of the workers in their threads."""
    clocks = Clocks()
    phases, ends = TimedPhases(clocks), Ends(clocks)
    with patch.object(queue, "SimpleQueue", lambda: TimedQueue(clocks)):
        network = TimedNetworkWorker(phases, SimpleNamespace(has_failed=False), ends)  # type: ignore[arg-type]
        node = NodeWorker(phases, network, ends)  # type: ignore[arg-type]
    network.crossing_s = {key: cost.crossing_s for key, cost in enumerate(costs)}
    for key, (bucket_ready_s, cost) in enumerate(zip(ready_s, costs, strict=True)):
        steps = RankPhases([cost.before_s], [], [cost.after_s] if cost.after_s else [], cost.crosses)  # type: ignore[list-item]
        clocks.now_s = max(clocks.now_s, bucket_ready_s)
        is_last = key == len(costs) - 1
        crossed: Any = TimedEvent(clocks)
        node.queue.put(Work(key, None, 0, 0, None, None, steps, None, is_last, None, crossed))  # type: ignore[arg-type]
    node.queue.put(None)
    for worker in (node, network):
        worker.thread.join(timeout=10)
    for key, end_s in ends.ends_s.items():
        phases.spans_s[key] += [end_s] * (6 - len(phases.spans_s[key]))
    return [Passage(*phases.spans_s[key]) for key in range(len(costs))]


def is_a_step(costs: list[Costs]) -> bool:
    """Return False for costs that no topology has: the last bucket must end the step."""
    return costs[-1].crosses or not any(cost.after_s for cost in costs)


@given(buckets=buckets)
def test_prediction_equals_the_workers(buckets: list[tuple[float, Costs]]) -> None:
    """Buckets have one part each, and one of them is ahead."""
    ready_s, costs = map(list, zip(*buckets, strict=True))
    assume(is_a_step(costs))
    with patch.object(phases, "DEPTH", 1):
        assert pass_through(ready_s, costs) == run_step(ready_s, costs)
