"""The choice for a run: which gradients travel together, and by which plan, with the numbers that decided.

choosing.py makes it, once.  It is stored, and read by the hook that all-reduces, by whatever explains it, and by a run
that resumes.
"""

import hashlib

import msgspec
from msgspec import Struct

from megabatch.planning.cost import Link, bytes_crossing
from megabatch.planning.pipeline import ELEMENT_BYTES, Costs, GradientDtype, Passage, exposed_s, pass_through
from megabatch.planning.plan import Plan
from megabatch.planning.topology import Axis, Topology


class PricedPlan(Struct, frozen=True):
    """One plan for one bucket; its seconds are those of the bucket alone."""

    plan: Plan
    costs: Costs
    measured_s: float | None = None

    @property
    def predicted_s(self) -> float:
        return self.costs.before_s + self.costs.crossing_s + self.costs.after_s

    @property
    def expected_costs(self) -> Costs:
        """As measured, if it was; shared out as predicted."""
        ratio = 1.0 if self.measured_s is None else self.measured_s / self.predicted_s
        before_s, crossing_s, after_s, crosses = self.costs
        return Costs(ratio * before_s, ratio * crossing_s, ratio * after_s, crosses)


class Bucket(Struct, frozen=True, kw_only=True):
    gradients: list[str]  # their names, in the order of backward
    num_elements: int
    dtype: GradientDtype
    ready_s: float  # since backward began
    candidates: list[PricedPlan]
    chosen: int  # its place among the candidates
    reason: str

    @property
    def candidate(self) -> PricedPlan:
        return self.candidates[self.chosen]

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes

    @property
    def measured_places(self) -> set[int]:
        """Of the candidates that were measured."""
        return {place for place, candidate in enumerate(self.candidates) if candidate.measured_s is not None}


class Tuning(Struct, frozen=True, kw_only=True):
    topology: Topology
    links: dict[Axis, Link]
    backward_s: float
    buckets: list[Bucket]
    caps_mb: list[float]  # `bucket_cap_mb_list`, with which DDP makes these buckets
    in_parts: bool  # as CPUs cut buckets; accelerators do not, and prices say so

    @property
    def passages(self) -> list[Passage]:
        """When each bucket is expected to be all-reduced, in seconds since backward began."""
        return pass_through([b.ready_s for b in self.buckets], [b.candidate.expected_costs for b in self.buckets])

    @property
    def predicted_s(self) -> float:
        """When all are, since backward began."""
        return max((passage.end_s for passage in self.passages), default=0.0)

    @property
    def exposed_s(self) -> float:
        """How long a step waits for the all-reduce after backward."""
        return exposed_s(self.passages, self.backward_s)

    @property
    def bytes_crossing(self) -> list[int]:
        """Bytes that each node sends to the others in a step."""
        sent = [bytes_crossing(b.plan, self.topology, b.num_elements, b.element_bytes) for b in self.buckets]
        return [sum(of_node) for of_node in zip(*sent, strict=True)]

    @property
    def rounding(self) -> str:
        """Tells apart choices that may round differently: plans of buckets, hosts, and where the backend sums by its
        own rule, also the cut."""
        own_rule = ("flat", "ring")
        cut = [(b.gradients if b.plan.name.startswith(own_rule) else [], b.plan.name) for b in self.buckets]
        names = sorted({(name, bucket.plan.name) for bucket in self.buckets for name in bucket.gradients})
        text = msgspec.json.encode([self.topology.nodes, names, cut if any(part for part, _ in cut) else []])
        return hashlib.sha256(text).hexdigest()[:8]

    @property
    def algorithms(self) -> str:
        """The names of the plans, as torus/bf16+flat/bf16."""
        return "+".join(dict.fromkeys(bucket.plan.name for bucket in self.buckets))
