from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megabatch.planning.pipeline import Costs, exposed_s, pass_through
from tests.support.pipelines import buckets, seconds


@given(buckets=buckets)
def test_each_thread_runs_one_part_at_a_time_and_none_before_it_is_ready(
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
def test_nothing_ends_sooner_if_a_bucket_is_later_or_takes_longer(
    buckets: list[tuple[float, Costs]], which: int, more: tuple[float, ...]
) -> None:
    assume(which < len(buckets))
    later_s, *longer_s = more
    ready_s, costs = buckets[which]
    if not costs.crosses:
        longer_s[1:] = [0.0, 0.0]
    before_s, crossing_s, after_s = (cost + extra for cost, extra in zip(costs[:3], longer_s, strict=True))
    raised = Costs(before_s, crossing_s, after_s, costs.crosses)
    changed = [*buckets[:which], (ready_s + later_s, raised), *buckets[which + 1 :]]
    before, after = (pass_through(*zip(*case, strict=True)) for case in (buckets, changed))
    assert all(sooner.end_s <= later.end_s for sooner, later in zip(before, after, strict=True))


def test_work_in_the_node_overlaps_with_the_network() -> None:
    parts = Costs(1.0, 4.0, 1.0, crosses=True)
    assert pass_through([0.0, 0.0, 0.0], [parts] * 3) == [
        (0.0, 1.0, 1.0, 5.0, 5.0, 6.0),
        (1.0, 2.0, 5.0, 9.0, 9.0, 10.0),
        (6.0, 7.0, 9.0, 13.0, 13.0, 14.0),
    ]


@pytest.mark.parametrize(("backward_end_s", "exposed"), [(0.0, 14.0), (10.0, 4.0), (20.0, 0.0)])
def test_exposed_time_is_communication_after_backward(backward_end_s: float, exposed: float) -> None:
    passages = pass_through([0.0, 0.0, 0.0], [Costs(1.0, 4.0, 1.0, crosses=True)] * 3)
    assert exposed_s(passages, backward_end_s) == exposed
