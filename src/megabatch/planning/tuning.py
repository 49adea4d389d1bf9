"""The buckets and plans chosen for a run, with the numbers behind the choice.

`choosing.choose` makes a `Tuning` once per run.  It is stored with the run and read by the communication hook, by the
commands that explain it, and by a run that resumes.

A stored file can hold anything, so `decode_tuning` also checks values that the types allow but `choose` never makes: no
candidates, a chosen index out of range, a plan over a link that was not measured, 1e300 seconds.  Whether a valid
tuning fits the ranks and gradients of a run is a separate question (`choosing.is_made_for`).
"""

import hashlib
import math
from collections.abc import Iterator
from typing import get_args

import msgspec
from msgspec import Struct

from megabatch.io.reading import Undecodable, decode_json
from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST, shared_memory
from megabatch.planning.cost import Link, bytes_crossing
from megabatch.planning.pipeline import ELEMENT_BYTES, Costs, GradientDtype, Passage, exposed_s, pass_through
from megabatch.planning.plan import CommDtype, Plan, axes_of
from megabatch.planning.topology import Axis, ClusterShape, Topology

MAX_BYTES = 32 << 20  # of a stored file; 16,384 ranks and 300 gradients take half a MB
MIN_PRICE_S, MAX_SECONDS = 1e-15, 1e6  # a measured time is divided by its price, so the price must not be 0
MAX_ELEMENTS = 2**48
MAX_CAP_MB = 2.0**32


class PricedPlan(Struct, frozen=True):
    """One plan for one bucket.  Seconds are for this bucket without others."""

    plan: Plan
    costs: Costs
    measured_s: float | None = None

    @property
    def predicted_s(self) -> float:
        return self.costs.before_s + self.costs.crossing_s + self.costs.after_s

    @property
    def expected_costs(self) -> Costs:
        """The predicted costs, scaled to the measured total if there is one."""
        ratio = 1.0 if self.measured_s is None else self.measured_s / self.predicted_s
        before_s, crossing_s, after_s, crosses = self.costs
        return Costs(ratio * before_s, ratio * crossing_s, ratio * after_s, crosses)


class Bucket(Struct, frozen=True, kw_only=True):
    gradients: list[str]  # names, in the order of backward
    num_elements: int
    dtype: GradientDtype
    ready_s: float  # since backward started
    candidates: list[PricedPlan]
    chosen: int  # index into candidates
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
        """Indices of the candidates that were measured."""
        return {place for place, candidate in enumerate(self.candidates) if candidate.measured_s is not None}


class Tuning(Struct, frozen=True, kw_only=True):
    topology: Topology
    links: dict[Axis, Link]
    backward_s: float
    buckets: list[Bucket]
    caps_mb: list[float]  # the `bucket_cap_mb_list` with which DDP makes these buckets
    in_parts: bool  # True on CPUs, which send a bucket in parts; accelerators send it whole

    @property
    def passages(self) -> list[Passage]:
        """When each bucket is expected to be all-reduced, in seconds since backward started."""
        return pass_through([b.ready_s for b in self.buckets], [b.candidate.expected_costs for b in self.buckets])

    @property
    def predicted_s(self) -> float:
        """When the last bucket is all-reduced, in seconds since backward started."""
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
        """A hash that differs between tunings that may round differently.

        It covers the plan of every gradient and the nodes.  The backend's all-reduce rounds by position in the bucket,
        so for flat and ring plans it also covers the buckets.
        """
        by_backend = ("flat", "ring")
        cut = [(b.gradients if b.plan.name.startswith(by_backend) else [], b.plan.name) for b in self.buckets]
        names = sorted({(name, bucket.plan.name) for bucket in self.buckets for name in bucket.gradients})
        text = msgspec.json.encode([self.topology.nodes, names, cut if any(part for part, _ in cut) else []])
        return hashlib.sha256(text).hexdigest()[:8]

    @property
    def algorithms(self) -> str:
        """The names of the plans in use, such as "torus/bf16+flat/bf16"."""
        return "+".join(dict.fromkeys(bucket.plan.name for bucket in self.buckets))


def decode_tuning(content: bytes) -> Tuning:
    """Return the tuning stored as JSON.  Raises `Undecodable` if it is not valid."""
    return validate_tuning(decode_json(content, Tuning))


def validate_tuning(tuning: Tuning) -> Tuning:
    problem = next(find_problems(tuning), None)
    if problem:
        raise Undecodable(problem)
    return tuning


def find_problems(tuning: Tuning) -> Iterator[str]:
    if not tuning.buckets:
        yield "it has no buckets"
    if not tuning.caps_mb or not all(0 <= cap_mb <= MAX_CAP_MB for cap_mb in tuning.caps_mb):
        yield f"caps_mb={tuning.caps_mb}, expected at least one value, each from 0 to {MAX_CAP_MB:g}"
    for axis, link in tuning.links.items():
        if not all(map(is_time, (link.alpha_s, link.beta_s_per_byte, link.gamma_s_per_byte))):
            yield f"the link {axis} has a time outside 0 to {MAX_SECONDS:g} s"
    if not is_time(tuning.backward_s):
        yield f"backward_s={tuning.backward_s:g}, expected 0 to {MAX_SECONDS:g} s"
    names = [name for bucket in tuning.buckets for name in bucket.gradients]
    if len(set(names)) < len(names):
        yield "it has a gradient twice"
    known = known_plans(tuning.topology.shape)
    for index, bucket in enumerate(tuning.buckets):
        yield from (f"bucket {index}: {problem}" for problem in find_bucket_problems(bucket, tuning, known))


def find_bucket_problems(bucket: Bucket, tuning: Tuning, known: set[Plan]) -> Iterator[str]:
    candidates = bucket.candidates
    if not bucket.gradients:
        yield "it has no gradients"
    if not 0 <= bucket.num_elements <= MAX_ELEMENTS:
        yield f"num_elements={bucket.num_elements}, expected 0 to {MAX_ELEMENTS}"
    if not is_time(bucket.ready_s):
        yield f"ready_s={bucket.ready_s:g}, expected 0 to {MAX_SECONDS:g} s"
    if not 0 <= bucket.chosen < len(candidates):
        yield f"chosen={bucket.chosen}, but there are {len(candidates)} candidates"
    plans = [candidate.plan for candidate in candidates]
    if not known.issuperset(plans):
        yield f"{next(plan.name for plan in plans if plan not in known)!r} is not an all-reduce of these ranks"
    elif not axes_of(plans) <= tuning.links.keys():
        yield "a candidate uses a link that was not measured"
    if plans != [candidate.plan for candidate in tuning.buckets[0].candidates]:
        yield "its candidates differ from those of bucket 0"
    if not all(map(has_valid_times, candidates)):
        yield f"a candidate has a time outside 0 to {MAX_SECONDS:g} s"


def has_valid_times(candidate: PricedPlan) -> bool:
    measured_s = candidate.measured_s
    if not all(map(is_time, candidate.costs[:3])):
        return False
    return measured_s is None or (is_time(measured_s) and candidate.predicted_s > MIN_PRICE_S)


def is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds <= MAX_SECONDS


def known_plans(shape: ClusterShape) -> set[Plan]:
    """Return the plans of every algorithm in every dtype."""
    plans = (make(shape, dtype) for make in (ALGORITHMS | ON_REQUEST).values() for dtype in get_args(CommDtype))
    one_node = {shared_memory(shape)} if shape.num_nodes == 1 else set()
    return {plan for plan in plans if plan} | one_node
