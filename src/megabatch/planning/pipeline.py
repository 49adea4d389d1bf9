"""When the buckets of a step are all-reduced, predicted: the two threads of comm/cpu/workers.py, without threads.

Legend: a bucket is ready when backward has filled it.  Its plan has a part in the node (before), one on the network
(crossing) and one in the node again (after).  Buckets a, b, c pass in order, each thread with one part at a time:

    in the node    a1 b1       a3 c1       b3          c3
    network           a2          b2          c2

What a bucket does after follows what the next one that crosses does before, however late that is ready; in the last
bucket of a step it follows at once.  Buckets are wholes here: the reducer cuts them into parts and lets a few go ahead,
which `choosing.price` takes into account for the parts of one bucket.

Every time is a maximum of sums of what was before: nothing ends sooner because something was ready later or cost more.
One bucket costs a few additions.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megabatch.planning.plan import Plan

PART_BYTES = 4 << 20  # of a bucket, at most, cross the network at a time


def num_parts(plan: Plan, num_bytes: int) -> int:
    """Of a bucket: parts follow each other through the node and over the network.  One, if it does not cross."""
    return max(1, math.ceil(num_bytes / PART_BYTES)) if plan.crosses else 1


class Costs(NamedTuple):
    """What the parts of a plan cost for one bucket."""

    before_s: float
    crossing_s: float
    after_s: float  # 0: nothing follows, and the thread of the network finishes the bucket
    crosses: bool  # False: the bucket is done after `before_s`


class Passage(NamedTuple):
    """When the parts of one bucket begin and end, ascending; a part that it has not takes no time."""

    begin_s: float
    before_end_s: float
    crossing_begin_s: float
    crossing_end_s: float
    after_begin_s: float
    end_s: float


def pass_through(ready_s: Sequence[float], costs: Sequence[Costs]) -> list[Passage]:
    """The passage of every bucket of a step."""
    passages: list[Passage] = []
    node_s = network_s = 0.0  # each thread is free from here on
    crossing: int | None = None  # the bucket whose last part is still to be done
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
            passages[crossing] = end_crossing(passages[crossing], node_s, costs[crossing])
            node_s = passages[crossing].end_s
        crossing = index if cost.after_s else None
    if crossing is not None:
        passages[crossing] = end_crossing(passages[crossing], node_s, costs[crossing])
    return passages


def end_crossing(passage: Passage, node_s: float, costs: Costs) -> Passage:
    """With its last part, begun when the thread in the node is free and the bucket has crossed."""
    begin_s = max(node_s, passage.crossing_end_s)
    return passage._replace(after_begin_s=begin_s, end_s=begin_s + costs.after_s)


def exposed_s(passages: Sequence[Passage], backward_end_s: float) -> float:
    """How long a step waits for the all-reduce after backward."""
    return max(0.0, max(passage.end_s for passage in passages) - backward_end_s)


# What a backward pass yields: gradients in the order in which they appear, and when each is ready to travel.

GradientDtype = Literal["fp32", "fp64", "bf16", "fp16"]
ELEMENT_BYTES: dict[GradientDtype, int] = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}


class Gradient(NamedTuple):
    num_bytes: int
    dtype: GradientDtype


class RecordedBackward(NamedTuple):
    names: Sequence[str]
    gradients: Sequence[Gradient]
    ready_s: Sequence[float]  # since backward began
