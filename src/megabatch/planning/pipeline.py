"""Predict when the buckets of a step are all-reduced, as the two threads of comm/cpu/workers.py run them.

Legend: a bucket is ready when backward has filled it.  Its plan has a part inside the node (before), a part on the
network (crossing) and a second part inside the node (after).  Buckets a, b, c pass in order, and each thread runs one
part at a time:

    in the node    a1 b1       a3 c1       b3          c3
    network           a2          b2          c2

The `after` part of a bucket runs behind the `before` part of the next bucket that crosses, even if that bucket is ready
late; for the last bucket of a step it runs at once.  Here a bucket is indivisible.  The reducer cuts buckets into
parts and overlaps them; `choosing.price` accounts for that within one bucket.

Every time is a maximum of sums of earlier times, so nothing ends sooner because another part was ready later or took
longer.  Cost: a few additions per bucket.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megabatch.planning.plan import Plan

PART_BYTES = 4 << 20  # the most bytes of a bucket that cross the network at a time

GradientDtype = Literal["fp32", "fp64", "bf16", "fp16"]
ELEMENT_BYTES: dict[GradientDtype, int] = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}


class Gradient(NamedTuple):
    num_bytes: int
    dtype: GradientDtype


class RecordedBackward(NamedTuple):
    """The gradients of one backward pass, in the order in which they become ready."""

    names: Sequence[str]
    gradients: Sequence[Gradient]
    ready_s: Sequence[float]  # since backward started


class Costs(NamedTuple):
    """The seconds that each part of a plan takes for one bucket."""

    before_s: float
    crossing_s: float
    after_s: float  # 0: no part follows, and the network thread finishes the bucket
    crosses: bool  # False: the bucket is done after `before_s`


class Passage(NamedTuple):
    """The start and end of each part of one bucket, ascending.  A part that the plan lacks takes no time."""

    begin_s: float
    before_end_s: float
    crossing_begin_s: float
    crossing_end_s: float
    after_begin_s: float
    end_s: float


def num_parts(plan: Plan, num_bytes: int) -> int:
    """Return into how many parts a bucket is cut to overlap node and network: 1 if the plan does not cross."""
    return max(1, math.ceil(num_bytes / PART_BYTES)) if plan.crosses else 1


def pass_through(ready_s: Sequence[float], costs: Sequence[Costs]) -> list[Passage]:
    """Return the passage of every bucket of a step."""
    passages: list[Passage] = []
    node_s = network_s = 0.0  # when each thread becomes free
    crossing: int | None = None  # the bucket whose `after` part has not run yet
    for index, (bucket_ready_s, cost) in enumerate(zip(ready_s, costs, strict=True)):
        begin_s = max(node_s, bucket_ready_s)
        node_s = begin_s + cost.before_s
        if not cost.crosses:
            passages.append(Passage(begin_s, node_s, node_s, node_s, node_s, node_s))
            continue
        crossing_begin_s = max(network_s, node_s)
        network_s = crossing_begin_s + cost.crossing_s
        passages.append(Passage(begin_s, node_s, crossing_begin_s, network_s, network_s, network_s))
        if crossing is not None:
            passages[crossing] = with_after(passages[crossing], node_s, costs[crossing])
            node_s = passages[crossing].end_s
        crossing = index if cost.after_s else None
    if crossing is not None:
        passages[crossing] = with_after(passages[crossing], node_s, costs[crossing])
    return passages


def with_after(passage: Passage, node_s: float, costs: Costs) -> Passage:
    """Add the `after` part, which starts when the node thread is free and the bucket has crossed."""
    begin_s = max(node_s, passage.crossing_end_s)
    return passage._replace(after_begin_s=begin_s, end_s=begin_s + costs.after_s)


def exposed_s(passages: Sequence[Passage], backward_end_s: float) -> float:
    """Return how long a step waits for the all-reduce after backward."""
    return max(0.0, max(passage.end_s for passage in passages) - backward_end_s)
