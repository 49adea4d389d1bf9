"""step.json: one ordinary step of rank 0, and when each bucket of its gradients was ready and all-reduced."""

from typing import Literal

from msgspec import Struct, field

from megabatch.runs.records import Count
from megabatch.runs.time_breakdown import Seconds

Lane = Literal["training", "node", "network"]


class Span(Struct, frozen=True, kw_only=True):
    """What a lane did; seconds since the step began."""

    lane: Lane
    name: str  # forward, backward, ...; of node and network the phase, such as "all_reduce in the node"
    begin_s: Seconds
    end_s: Seconds
    bucket: Count | None = None  # of node and network; None: that of the step's metrics
    is_wait: bool = False  # for other ranks, or for the network


class TracedBucket(Struct, frozen=True, kw_only=True):
    bucket: Count
    num_bytes: Count
    plan: str
    ready_s: Seconds
    reduced_s: Seconds


class StepTrace(Struct, frozen=True, kw_only=True):
    step: Count
    duration_s: Seconds
    spans: list[Span] = field(default_factory=list)
    buckets: list[TracedBucket] = field(default_factory=list)
