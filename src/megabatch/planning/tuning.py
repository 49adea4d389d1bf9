"""The choice for a run: which gradients travel together, and by which plan, with the numbers that decided.

What is known of the links (cost.Link, along each axis) prices every plan for a bucket of any size; `merging.merge` cuts
the gradients and gives each bucket the plan with the least predicted end of communication.  Where plans come close,
prices are not enough: these are measured, and the measurement decides (`confirm`).  A tuning is made once, stored, and
read by the hook that sums, by `megabatch plan` that explains, and by a run that goes on.

The precision of the wire is part of every plan and never chosen here: it would make results depend on noise.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from megabatch.planning.buckets import Gradient
from megabatch.planning.cost import Link, bytes_crossing, phase_seconds
from megabatch.planning.merging import merge
from megabatch.planning.pipeline import Costs, Passage, exposed_s, num_parts, pass_through
from megabatch.planning.plan import Plan
from megabatch.planning.topology import Axis, Topology

CLOSE = 1.3  # plans whose price is within this factor of the least are measured
SAME = 1.15  # less is no reason for two plans: times on a busy machine differ by so much
ELEMENT_BYTES = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}


class Candidate(Struct, frozen=True):
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
    dtype: str
    ready_s: float  # since backward began
    candidates: list[Candidate]
    chosen: int
    reason: str

    @property
    def candidate(self) -> Candidate:
        return self.candidates[self.chosen]

    @property
    def plan(self) -> Plan:
        return self.candidate.plan

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ELEMENT_BYTES[self.dtype]


class Tuning(Struct, frozen=True, kw_only=True):
    topology: Topology
    links: dict[Axis, Link]
    backward_s: float
    buckets: list[Bucket]
    caps_mb: list[float] = []  # `bucket_cap_mb_list`, with which DDP makes these buckets

    @property
    def passages(self) -> list[Passage]:
        """When each bucket is expected to be summed, in seconds since backward began."""
        return pass_through([b.ready_s for b in self.buckets], [b.candidate.expected_costs for b in self.buckets])

    @property
    def predicted_s(self) -> float:
        """When all are, since backward began."""
        return max((passage.end_s for passage in self.passages), default=0.0)

    @property
    def exposed_s(self) -> float:
        """How long a step waits for sums after backward."""
        return exposed_s(self.passages, self.backward_s)

    @property
    def bytes_crossing(self) -> list[int]:
        """Bytes that each node sends to the others in a step."""
        sent = [
            bytes_crossing(bucket.plan, self.topology, bucket.num_elements, ELEMENT_BYTES[bucket.dtype])
            for bucket in self.buckets
        ]
        return [sum(of_node) for of_node in zip(*sent, strict=True)]

    @property
    def rounding(self) -> str:
        """Tells apart choices that may round differently: plans of buckets, hosts, and where the engine sums by its
        own rule, also the cut."""
        cut = [(bucket.gradients if "flat" in bucket.plan.name else [], bucket.plan.name) for bucket in self.buckets]
        names = sorted({(name, bucket.plan.name) for bucket in self.buckets for name in bucket.gradients})
        text = msgspec.json.encode([self.topology.nodes, names, cut if any(part for part, _ in cut) else []])
        return hashlib.sha256(text).hexdigest()[:8]

    @property
    def algorithms(self) -> str:
        """The names of the plans, as torus/bf16+flat/bf16."""
        return "+".join(dict.fromkeys(bucket.plan.name for bucket in self.buckets))


def price(
    plan: Plan, topology: Topology, links: Mapping[Axis, Link], num_elements: int, element_bytes: int = 4
) -> Costs:
    """Of a bucket alone.  Its parts follow each other through node and network, so what a part does in the node is
    hidden under the crossing of another, but for the first and the last."""
    parts = num_parts(plan, num_elements * element_bytes)
    times_s = phase_seconds(plan, topology, -(-num_elements // parts), links, element_bytes)
    network = plan.network
    before_s, crossing_s, after_s = map(sum, (times_s[: network.start], times_s[network], times_s[network.stop :]))
    if not plan.crosses:
        return Costs(before_s, 0.0, 0.0, crosses=False)
    slowest_s = max(before_s + after_s, crossing_s)
    return Costs(before_s, crossing_s + (parts - 1) * slowest_s, after_s, crosses=True)


def choose(
    names: Sequence[str],
    gradients: Sequence[Gradient],
    ready_s: Sequence[float],
    plans: Sequence[Plan],
    topology: Topology,
    links: dict[Axis, Link],
    cut: Sequence[Sequence[int]] | None = None,  # the gradients of each bucket; None: chosen too
    forced: str = "",  # what has left one plan alone
) -> Tuning:
    """The cut and the plans with the least predicted end of communication.

    Where plans come close, `confirm` then decides by measurement.
    """

    def prices(num_bytes: int, dtype: str) -> list[Costs]:
        size = ELEMENT_BYTES[dtype]
        return [price(plan, topology, links, num_bytes // size, size) for plan in plans]

    merged = merge(gradients, ready_s, prices) if cut is None else []
    options: list[int | None] = [None] * len(cut or ()) or [bucket.option for bucket in merged]
    buckets = []
    for indices, option in zip(cut or [bucket.gradients for bucket in merged], options, strict=True):
        num_bytes, dtype = sum(gradients[index].num_bytes for index in indices), gradients[indices[0]].dtype
        candidates = [Candidate(plan, costs) for plan, costs in zip(plans, prices(num_bytes, dtype), strict=True)]
        bucket = Bucket(
            gradients=[names[index] for index in indices],
            num_elements=num_bytes // ELEMENT_BYTES[dtype],
            dtype=dtype,
            ready_s=max(ready_s[index] for index in indices),
            candidates=candidates,
            chosen=0,
            reason="",
        )
        buckets.append(decide(bucket, forced, option))
    return Tuning(topology=topology, links=links, backward_s=max(ready_s, default=0.0), buckets=buckets)


def open_questions(tuning: Tuning) -> list[tuple[int, int]]:
    """Buckets and candidates that should be measured: those that prices do not tell apart; and what crosses a network
    alone, since prices do not know what happens when cores are short."""
    questions = []
    for index, bucket in enumerate(tuning.buckets):
        least_s = min(candidate.predicted_s for candidate in bucket.candidates)
        close = [i for i, candidate in enumerate(bucket.candidates) if candidate.predicted_s <= CLOSE * least_s]
        if len(close) == 1:
            close = [bucket.chosen] if bucket.plan.crosses else []
        questions += [(index, place) for place in close]
    return questions


def with_measurements(tuning: Tuning, measured_s: Mapping[tuple[int, int], float]) -> Tuning:
    """By bucket and candidate; what was measured before stays."""
    buckets = []
    for index, bucket in enumerate(tuning.buckets):
        candidates = [
            msgspec.structs.replace(candidate, measured_s=measured_s.get((index, place), candidate.measured_s))
            for place, candidate in enumerate(bucket.candidates)
        ]
        buckets.append(msgspec.structs.replace(bucket, candidates=candidates))
    return msgspec.structs.replace(tuning, buckets=buckets)


def confirm(tuning: Tuning) -> Tuning:
    """Decides again, where several have been measured: for each bucket, and then whether one plan for all does as well.

    Two plans at once have twice the connections to keep busy, which no bucket alone shows.
    """
    decided = [
        decide(bucket, bucket.reason) if len(measured_places(bucket)) > 1 else bucket for bucket in tuning.buckets
    ]
    mixed = msgspec.structs.replace(tuning, buckets=decided)
    if len({bucket.plan for bucket in decided}) == 1:
        return mixed
    known = [measured_places(bucket) for bucket in decided if measured_places(bucket)]
    common = sorted(set.intersection(*known)) if known else []
    alike = [msgspec.structs.replace(mixed, buckets=[take(place, bucket) for bucket in decided]) for place in common]
    good = [single for single in alike if single.exposed_s <= SAME * mixed.exposed_s]
    return min(good, key=lambda single: single.exposed_s, default=mixed)


def measured_places(bucket: Bucket) -> set[int]:
    return {place for place, candidate in enumerate(bucket.candidates) if candidate.measured_s is not None}


def take(place: int, bucket: Bucket) -> Bucket:
    """With this candidate, if it was measured."""
    if place == bucket.chosen or place not in measured_places(bucket):
        return bucket
    reason = f"measured: {bucket.plan.name} is ahead here, but two plans for all buckets would hardly expose less"
    return msgspec.structs.replace(bucket, chosen=place, reason=reason)


def decide(bucket: Bucket, reason: str, option: int | None = None) -> Bucket:
    """The candidate with the least seconds: measured, where any was measured; or the option that ends all soonest."""
    candidates = bucket.candidates
    if len(candidates) == 1:
        return msgspec.structs.replace(bucket, chosen=0, reason=reason or "the only one that applies")
    was_measured = any(candidate.measured_s is not None for candidate in candidates)
    seconds = {
        place: candidate.measured_s if was_measured else candidate.predicted_s
        for place, candidate in enumerate(candidates)
    }
    ranked = sorted((taken_s, place) for place, taken_s in seconds.items() if taken_s is not None)
    (least_s, chosen), (next_s, runner_up) = ranked[:2]
    if option is not None and option != chosen:  # dearer alone, but it leaves node or network free for others
        return msgspec.structs.replace(bucket, chosen=option, reason="all buckets together end sooner so")
    how = "close in price, measured" if was_measured else "by price"
    other = candidates[runner_up].plan.name
    return msgspec.structs.replace(
        bucket, chosen=chosen, reason=f"{how}: {other} takes {100 * (next_s / least_s - 1):.0f} % longer"
    )


def drift(before: Tuning, links: Mapping[Axis, Link]) -> float:
    """By what factor the choice is now predicted to take longer than when it was made; below 1: less long."""

    def total_s(known: Mapping[Axis, Link]) -> float:
        return sum(
            sum(price(b.plan, before.topology, known, b.num_elements, ELEMENT_BYTES[b.dtype])[:3])
            for b in before.buckets
        )

    earlier_s = total_s(before.links)
    return total_s(links) / earlier_s if earlier_s else 1.0
