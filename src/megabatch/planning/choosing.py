"""Chooses buckets and plans for a run: the whole decision but the measuring.

What is known of the links (cost.Link, along each axis) prices every plan for a bucket of any size (`price`); `choose`
cuts the gradients and gives each bucket the plan with the least predicted end of communication.  Where plans come
close, prices are not enough: `open_questions` says what to measure, the caller measures it on real ranks
(`with_measurements`), and the measurement decides (`confirm`).

The dtype that travels is part of every plan and never chosen here: it would make results depend on noise.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megabatch.planning.buckets import MIB, ddp_buckets, ddp_caps, fuse, merge
from megabatch.planning.cost import Link, phase_seconds
from megabatch.planning.pipeline import (
    ELEMENT_BYTES,
    PART_BYTES,
    Costs,
    Gradient,
    GradientDtype,
    RecordedBackward,
    num_parts,
)
from megabatch.planning.plan import Plan
from megabatch.planning.topology import Axis, ClusterShape, Topology
from megabatch.planning.tuning import Bucket, PricedPlan, Tuning

CLOSE = 1.3  # plans whose price is within this factor of the least are measured
SAME = 1.15  # less is no reason for two plans: times on a busy machine differ by so much
IN_NODE_MB = 25.0  # where nothing crosses a network: an all-reduce needs the cores that backward needs, early or late
MEASURED_ELEMENTS = 16 * MIB  # a larger bucket is measured at this size: its parts follow each other like these
STREAM = 8  # small ones in a row: ranks do not begin one at quite the same time

PriceOf = Callable[[Plan, int, int], Costs]  # a plan for so many elements of so many bytes
Call = tuple[int, int]  # a bucket, and the place of one of its candidates


class Question(NamedTuple):
    """One thing to measure: so many all-reduces of so many elements, one behind another, without other work."""

    plan: Plan
    num_elements: int
    dtype: GradientDtype
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls


def price(
    plan: Plan,
    shape: ClusterShape,
    links: Mapping[Axis, Link],
    num_elements: int,
    element_bytes: int = 4,
    in_parts: bool = True,  # False: on streams of accelerators, which take a bucket as a whole
) -> Costs:
    """Of a bucket alone.  Its parts follow each other through node and network, so what a part does in the node is
    hidden under the crossing of another, but for the first and the last."""
    parts = num_parts(plan, num_elements * element_bytes) if in_parts else 1
    times_s = phase_seconds(plan, shape, -(-num_elements // parts), links, element_bytes)
    if not plan.crosses:
        return Costs(sum(times_s), 0.0, 0.0, crosses=False)
    network = plan.network
    before_s, crossing_s, after_s = sum(times_s[: network.start]), sum(times_s[network]), sum(times_s[network.stop :])
    slowest_s = max(before_s + after_s, crossing_s)
    return Costs(before_s, crossing_s + (parts - 1) * slowest_s, after_s, crosses=True)


def choose(
    backward: RecordedBackward,
    plans: Sequence[Plan],
    topology: Topology,
    links: dict[Axis, Link],
    *,
    bucket_mb: float | None,  # gradients are fused up to this; None: chosen too
    forced: str = "",  # what has left one plan alone
    in_parts: bool = True,  # see `price`
) -> Tuning:
    """The buckets and the plans with the least predicted end of communication, and the caps that make DDP cut so.

    Where plans come close, `confirm` then decides by measurement.
    """
    shape = topology.shape

    def price_of(plan: Plan, num_elements: int, element_bytes: int) -> Costs:
        return price(plan, shape, links, num_elements, element_bytes, in_parts)

    if bucket_mb is None and topology.num_nodes == 1:
        bucket_mb = IN_NODE_MB
    buckets, caps_mb = choose_buckets(backward, plans, price_of, bucket_mb=bucket_mb, forced=forced)
    return Tuning(
        topology=topology,
        links=links,
        backward_s=max(backward.ready_s, default=0.0),
        buckets=buckets,
        caps_mb=caps_mb,
        in_parts=in_parts,
    )


def choose_buckets(
    backward: RecordedBackward,
    plans: Sequence[Plan],
    price_of: PriceOf,
    *,
    bucket_mb: float | None,
    forced: str = "",
) -> tuple[list[Bucket], list[float]]:
    """The same, for whatever has prices: a cluster need not exist, nor its ranks be named."""
    names, gradients, ready_s = backward

    def prices(num_bytes: int, dtype: GradientDtype) -> list[Costs]:
        size = ELEMENT_BYTES[dtype]
        return [price_of(plan, num_bytes // size, size) for plan in plans]

    def bucket_of(indices: Sequence[int], option: int | None) -> Bucket:
        num_bytes, dtype = sum(gradients[index].num_bytes for index in indices), gradients[indices[0]].dtype
        bucket = Bucket(
            gradients=[names[index] for index in indices],
            num_elements=num_bytes // ELEMENT_BYTES[dtype],
            dtype=dtype,
            ready_s=max(ready_s[index] for index in indices),
            candidates=[PricedPlan(*priced) for priced in zip(plans, prices(num_bytes, dtype), strict=True)],
            chosen=0,
            reason="",
        )
        return decide(bucket, forced, option)

    cut: list[tuple[list[int], int | None]]  # gradients of each bucket, and its plan if that is chosen with them
    if bucket_mb is None:
        cut = [(merged.gradients, merged.option) for merged in merge(gradients, ready_s, prices)]
    else:
        cut = [(indices, None) for indices in fuse(gradients, int(bucket_mb * MIB))]
    caps_mb = ddp_caps(gradients, [indices for indices, _ in cut])
    if caps_mb is None:  # of several dtypes, which have no common list: then as DDP cuts them
        largest = max(sum(gradients[index].num_bytes for index in indices) for indices, _ in cut)
        cut, caps_mb = [(indices, None) for indices in ddp_buckets(gradients, [largest])], [largest / MIB]
    return [bucket_of(indices, option) for indices, option in cut], caps_mb


def decide(bucket: Bucket, reason: str, option: int | None = None) -> Bucket:
    """The candidate with the least seconds: measured, where any was measured; or the option that ends all soonest."""
    candidates = bucket.candidates
    if len(candidates) == 1:
        return replace(bucket, chosen=0, reason=reason or "the only one that applies")
    was_measured = bool(bucket.measured_places)
    seconds = {
        place: candidate.measured_s if was_measured else candidate.predicted_s
        for place, candidate in enumerate(candidates)
    }
    ranked = sorted((taken_s, place) for place, taken_s in seconds.items() if taken_s is not None)
    (least_s, chosen), (next_s, runner_up) = ranked[:2]
    if option is not None and option != chosen:  # dearer alone, but it leaves node or network free for others
        return replace(bucket, chosen=option, reason="all buckets together end sooner so")
    how = "close in price, measured" if was_measured else "by price"
    other = candidates[runner_up].plan.name
    longer = f"{100 * (next_s / least_s - 1):.0f} % longer"
    return replace(bucket, chosen=chosen, reason=f"{how}: {other} takes {longer}")


def open_questions(tuning: Tuning) -> list[Question]:
    """What should be measured before `confirm`; nothing, once it has been."""
    return questions(tuning, open_calls(tuning))


def all_questions(tuning: Tuning) -> list[Question]:
    """What has not been measured yet, close or not, of all that is sent anywhere."""
    return questions(tuning, all_calls(tuning))


def questions(tuning: Tuning, calls: Sequence[Call]) -> list[Question]:
    """Each once, in the order of the first bucket that asks it."""
    return list(dict.fromkeys(question_of(tuning.buckets[index], place) for index, place in calls))


def open_calls(tuning: Tuning) -> list[Call]:
    """Candidates that prices do not tell apart; and what crosses a network alone, since prices do not know what happens
    when cores are short."""
    calls = []
    for index, bucket in enumerate(tuning.buckets):
        least_s = min(candidate.predicted_s for candidate in bucket.candidates)
        close = [i for i, candidate in enumerate(bucket.candidates) if candidate.predicted_s <= CLOSE * least_s]
        if len(close) == 1:
            close = [bucket.chosen] if bucket.plan.crosses else []
        calls += [(index, place) for place in close]
    return unmeasured(tuning, calls)


def all_calls(tuning: Tuning) -> list[Call]:
    return unmeasured(
        tuning,
        [
            (index, place)
            for index, bucket in enumerate(tuning.buckets)
            for place, candidate in enumerate(bucket.candidates)
            if candidate.plan.phases
        ],
    )


def unmeasured(tuning: Tuning, calls: Sequence[Call]) -> list[Call]:
    """Those of them that have no measurement, and elements to measure."""
    return [
        (index, place)
        for index, place in calls
        if tuning.buckets[index].num_elements and place not in tuning.buckets[index].measured_places
    ]


def question_of(bucket: Bucket, place: int) -> Question:
    num_elements = min(bucket.num_elements, MEASURED_ELEMENTS)
    count = 1 if num_elements * bucket.element_bytes > PART_BYTES else STREAM
    return Question(bucket.candidates[place].plan, num_elements, bucket.dtype, count)


def with_measurements(tuning: Tuning, taken_s: Mapping[Question, float]) -> Tuning:
    """With the seconds that the whole of each question took, its `count` all-reduces together.

    While there are open questions, an answer goes only to the candidates that asked: one that is clear by price is not
    put to the vote because a bucket of the same size was in doubt.  Later answers inform, and go to all candidates.
    What was measured before stays.
    """
    measured_s: dict[Call, float] = {}
    for index, place in open_calls(tuning) or all_calls(tuning):
        bucket = tuning.buckets[index]
        question = question_of(bucket, place)
        if question in taken_s:
            # A larger bucket fills and empties the pipeline no more often: scaled as its price is.
            size, shape = bucket.element_bytes, tuning.topology.shape
            costs = price(question.plan, shape, tuning.links, question.num_elements, size, tuning.in_parts)
            priced_s = sum(costs[:3])
            growth = bucket.candidates[place].predicted_s / priced_s
            measured_s[index, place] = taken_s[question] / question.count * growth
    buckets = []
    for index, bucket in enumerate(tuning.buckets):
        candidates = [
            replace(candidate, measured_s=measured_s.get((index, place), candidate.measured_s))
            for place, candidate in enumerate(bucket.candidates)
        ]
        buckets.append(replace(bucket, candidates=candidates))
    return replace(tuning, buckets=buckets)


def confirm(tuning: Tuning) -> Tuning:
    """Decides again, where several have been measured: for each bucket, and then whether one plan for all does as well.

    Two plans at once have twice the connections to keep busy, which no bucket alone shows.
    """
    decided = [decide(b, b.reason) if len(b.measured_places) > 1 else b for b in tuning.buckets]
    mixed = replace(tuning, buckets=decided)
    if len({bucket.plan for bucket in decided}) == 1:
        return mixed
    known = [bucket.measured_places for bucket in decided if bucket.measured_places]
    common = sorted(set.intersection(*known)) if known else []
    alike = [replace(mixed, buckets=[take(place, bucket) for bucket in decided]) for place in common]
    good = [single for single in alike if single.exposed_s <= SAME * mixed.exposed_s]
    return min(good, key=lambda single: single.exposed_s, default=mixed)


def take(place: int, bucket: Bucket) -> Bucket:
    """With this candidate, if it was measured."""
    if place == bucket.chosen or place not in bucket.measured_places:
        return bucket
    reason = f"measured: {bucket.plan.name} is ahead here, but two plans for all buckets would hardly expose less"
    return replace(bucket, chosen=place, reason=reason)


def drift(tuning: Tuning, links: Mapping[Axis, Link]) -> float:
    """By what factor the choice is now predicted to take longer than when it was made; below 1: less long."""
    shape = tuning.topology.shape

    def total_s(known: Mapping[Axis, Link]) -> float:
        prices = [price(b.plan, shape, known, b.num_elements, b.element_bytes, tuning.in_parts) for b in tuning.buckets]
        return sum(sum(costs[:3]) for costs in prices)

    earlier_s = total_s(tuning.links)
    return total_s(links) / earlier_s if earlier_s else 1.0


def is_made_for(tuning: Tuning, topology: Topology, backward: RecordedBackward, candidates: Sequence[Plan]) -> bool:
    """True if a stored choice holds for these ranks and gradients, and has no plan but these."""
    of_name = dict(zip(backward.names, backward.gradients, strict=True))
    names = [name for bucket in tuning.buckets for name in bucket.gradients]
    if topology != tuning.topology or sorted(names) != sorted(of_name):
        return False
    for bucket in tuning.buckets:
        gradients = [of_name[name] for name in bucket.gradients]
        is_same = {gradient.dtype for gradient in gradients} <= {bucket.dtype}
        if not is_same or sum(gradient.num_bytes for gradient in gradients) != bucket.num_bytes:
            return False
    return cuts_as_stored(tuning, of_name) and all(bucket.plan in candidates for bucket in tuning.buckets)


def cuts_as_stored(tuning: Tuning, of_name: Mapping[str, Gradient]) -> bool:
    """Whether DDP makes these buckets with these caps."""
    names = [name for bucket in tuning.buckets for name in bucket.gradients]
    cut = ddp_buckets([of_name[name] for name in names], [int(cap_mb * MIB) for cap_mb in tuning.caps_mb])
    return sorted([names[index] for index in indices] for indices in cut) == sorted(b.gradients for b in tuning.buckets)
