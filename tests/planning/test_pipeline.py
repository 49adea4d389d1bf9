import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megabatch.comm import reducer
from megabatch.comm.reducer import Reducer, Steps, Work
from megabatch.planning.pipeline import Costs, Passage, exposed_s, pass_through

# Whole numbers, so that sums are exact whatever their order.
seconds = st.integers(0, 20).map(float)
some_seconds = st.integers(1, 20).map(float)
crossing = st.builds(Costs, seconds, some_seconds, seconds, st.just(True))
staying = st.builds(Costs, some_seconds, st.just(0.0), st.just(0.0), st.just(False))
buckets = st.lists(st.tuples(seconds, crossing | staying), min_size=1, max_size=8)


class Clocks(threading.local):
    """Every thread has its own time: an hour of work takes no time at all."""

    now_s = 0.0


class TimedQueue:
    """What a thread takes out, it has not before it was put in."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.waiting = queue.SimpleQueue()

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


class TimedReducer(Reducer):
    """The reducer's own loops in two threads of their own; a step is the seconds that it takes."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.in_node, self.on_network = TimedQueue(self.clocks), TimedQueue(self.clocks)
        self.waits_s = defaultdict(float)
        self.has_failed, self.timeline = False, None
        self.crossing_s: dict[int, float] = {}
        self.spans_s: dict[int, list[float]] = defaultdict(list)
        self.ends_s: dict[int, float] = {}

    def run_step(self, ready_s: list[float], costs: list[Costs]) -> list[Passage]:
        for key, (bucket_ready_s, cost) in enumerate(zip(ready_s, costs, strict=True)):
            after = [cost.after_s] if cost.after_s else []
            steps = Steps([cost.before_s], [], after, cost.crosses)
            self.crossing_s[key] = cost.crossing_s
            self.clocks.now_s = max(self.clocks.now_s, bucket_ready_s)
            is_last = key == len(costs) - 1
            work = Work(key, None, 0, 0, None, None, steps, None, is_last, None, crossed=TimedEvent(self.clocks))
            self.in_node.put(work)
        self.in_node.put(None)
        threads = [threading.Thread(target=loop, daemon=True) for loop in (self.work_in_node, self.work_on_network)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
        for key, end_s in self.ends_s.items():
            self.spans_s[key] += [end_s] * (6 - len(self.spans_s[key]))
        return [Passage(*self.spans_s[key]) for key in range(len(costs))]

    def stages(self, work: Work) -> Iterator[Callable[[], None]]:
        self.attempt(work, [self.crossing_s[work.key]])
        yield from ()

    def attempt(self, work: Work, steps: list[float]) -> None:
        begin_s = self.clocks.now_s
        self.clocks.now_s += sum(steps)
        self.spans_s[work.key] += [begin_s, self.clocks.now_s]

    def finish(self, work: Work) -> None:
        self.ends_s[work.key] = self.clocks.now_s


def is_a_step(costs: list[Costs]) -> bool:
    """In no topology some plans cross nothing and others have a part after: the last bucket would not end it."""
    return costs[-1].crosses or not any(cost.after_s for cost in costs)


@given(buckets=buckets)
def test_the_prediction_is_what_the_threads_of_the_reducer_do(buckets: list[tuple[float, Costs]]) -> None:
    """Of buckets of one part each, with one of them ahead."""
    ready_s, costs = map(list, zip(*buckets, strict=True))
    assume(is_a_step(costs))
    with patch.object(reducer, "LEAD", 1):
        assert pass_through(ready_s, costs) == TimedReducer().run_step(ready_s, costs)


@given(buckets=buckets)
def test_each_thread_does_one_thing_at_a_time_and_nothing_before_it_is_ready(
    buckets: list[tuple[float, Costs]],
) -> None:
    passages = pass_through(*zip(*buckets, strict=True))
    in_node, on_network = [], []
    for passage, (ready_s, costs) in zip(passages, buckets, strict=True):
        assert ready_s <= passage.begin_s and list(passage) == sorted(passage)
        assert passage.before_end_s == passage.begin_s + costs.before_s
        assert passage.crossing_end_s == passage.crossing_begin_s + costs.crossing_s
        assert passage.end_s == passage.after_begin_s + costs.after_s
        in_node.append((passage.begin_s, passage.before_end_s))
        if costs.crosses:
            on_network.append((passage.crossing_begin_s, passage.crossing_end_s))
        if costs.after_s:
            in_node.append((passage.after_begin_s, passage.end_s))
    for spans in (in_node, on_network):
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(spans)))


@given(buckets=buckets, which=st.integers(0, 7), more=st.tuples(seconds, seconds, seconds, seconds))
def test_nothing_ends_sooner_when_a_bucket_is_later_or_dearer(
    buckets: list[tuple[float, Costs]], which: int, more: tuple[float, ...]
) -> None:
    assume(which < len(buckets))
    later_s, *dearer_s = more
    ready_s, costs = buckets[which]
    if not costs.crosses:
        dearer_s[1:] = [0.0, 0.0]
    raised = Costs(*(cost + extra for cost, extra in zip(costs[:3], dearer_s, strict=True)), costs.crosses)
    changed = [*buckets[:which], (ready_s + later_s, raised), *buckets[which + 1 :]]
    before, after = (pass_through(*zip(*case, strict=True)) for case in (buckets, changed))
    assert all(sooner.end_s <= later.end_s for sooner, later in zip(before, after, strict=True))


def test_the_node_works_under_the_network() -> None:
    parts = Costs(1.0, 4.0, 1.0, crosses=True)
    assert pass_through([0.0, 0.0, 0.0], [parts] * 3) == [
        (0.0, 1.0, 1.0, 5.0, 5.0, 6.0),
        (1.0, 2.0, 5.0, 9.0, 9.0, 10.0),
        (6.0, 7.0, 9.0, 13.0, 13.0, 14.0),
    ]


@pytest.mark.parametrize(("backward_end_s", "exposed"), [(0.0, 14.0), (10.0, 4.0), (20.0, 0.0)])
def test_exposed_is_what_the_sums_take_after_backward(backward_end_s: float, exposed: float) -> None:
    passages = pass_through([0.0, 0.0, 0.0], [Costs(1.0, 4.0, 1.0, crosses=True)] * 3)
    assert exposed_s(passages, backward_end_s) == exposed
