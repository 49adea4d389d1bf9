"""Choose the buckets and plans of a run.  This module makes all decisions; its caller measures.

Idea: the measured links (cost.Link, one per axis) give the price of every plan for a bucket of any size (`price`).
`choose` cuts the gradients into buckets and gives each the plan with the earliest predicted end of communication.  If
the prices of plans are close, measurement decides: `open_questions` lists what to measure, the caller measures it on
real ranks and stores it (`with_measurements`), and `confirm` decides again.

The comm dtype is part of every plan and is never chosen here: results would depend on measurement noise.

Cost: that of `buckets.merge`; a price does not depend on the number of ranks.
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

CLOSE = 1.3  # plans priced within this factor of the least are measured
SAME = 1.15  # a smaller ratio does not justify a second plan: times on a busy machine vary by this factor
IN_NODE_MB = 25.0  # bucket size on one node: there an all-reduce and backward compete for the same cores
MEASURED_ELEMENTS = 16 * MIB  # larger buckets are measured at this size: they only have more of the same parts
STREAM = 8  # small all-reduces are measured in a row because ranks do not start at exactly the same time

PriceOf = Callable[[Plan, int, int], Costs]  # (plan, elements, bytes per element) -> costs
CandidateIndex = tuple[int, int]  # index of a bucket, and of one of its candidates


class Question(NamedTuple):
    """One measurement to make: `count` all-reduces of `num_elements` one after another, without other work."""

    plan: Plan
    num_elements: int
    dtype: GradientDtype
    count: int  # type: ignore[assignment]  # hides tuple.count, which is unused


def price(
    plan: Plan,
    shape: ClusterShape,
    links: Mapping[Axis, Link],
    num_elements: int,
    element_bytes: int = 4,
    in_parts: bool = True,  # False on accelerators, whose streams send a bucket whole
) -> Costs:
    """Return the costs of one bucket without others.

    A bucket passes through node and network in parts, so the work of a part in the node overlaps with the crossing of
    another part, except for the first and the last.
    """
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
    bucket_mb: float | None,  # size limit of a bucket; None: buckets are chosen too
    forced: str = "",  # the reason why there is only one plan
    in_parts: bool = True,  # see `price`
) -> Tuning:
    """Return the buckets and plans with the earliest predicted end of communication, and the caps for DDP.

    If prices of plans are close, `confirm` decides by measurement later.
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
    """Do the same for any prices, without a topology: the simulator's clusters need not exist."""
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

    cut: list[tuple[list[int], int | None]]  # gradients of each bucket, and its plan if `merge` chose one
    if bucket_mb is None:
        cut = [(merged.gradients, merged.option) for merged in merge(gradients, ready_s, prices)]
    else:
        cut = [(indices, None) for indices in fuse(gradients, int(bucket_mb * MIB))]
    caps_mb = ddp_caps(gradients, [indices for indices, _ in cut])
    if caps_mb is None:  # several dtypes without a common list: cut as DDP does with one cap
        largest = max(sum(gradients[index].num_bytes for index in indices) for indices, _ in cut)
        cut, caps_mb = [(indices, None) for indices in ddp_buckets(gradients, [largest])], [largest / MIB]
    return [bucket_of(indices, option) for indices, option in cut], caps_mb


def decide(bucket: Bucket, reason: str, option: int | None = None) -> Bucket:
    """Choose the candidate with the least seconds, measured if any was measured, or the option chosen by `merge`."""
    candidates = bucket.candidates
    if len(candidates) == 1:
        return replace(bucket, chosen=0, reason=reason or "the only plan that applies")
    was_measured = bool(bucket.measured_places)
    seconds = {
        place: candidate.measured_s if was_measured else candidate.predicted_s
        for place, candidate in enumerate(candidates)
    }
    ranked = sorted((taken_s, place) for place, taken_s in seconds.items() if taken_s is not None)
    (least_s, chosen), (next_s, runner_up) = ranked[:2]
    if option is not None and option != chosen:  # it takes longer, but leaves node or network free for other buckets
        return replace(bucket, chosen=option, reason="communication of all buckets ends sooner with it")
    how = "close in price, measured" if was_measured else "by price"
    other = candidates[runner_up].plan.name
    longer = f"{100 * (next_s / least_s - 1):.0f} % longer"
    return replace(bucket, chosen=chosen, reason=f"{how}: {other} takes {longer}")


def open_questions(tuning: Tuning) -> list[Question]:
    """Return what to measure before `confirm`; empty once it has been measured."""
    return questions(tuning, undecided_candidates(tuning))


def all_questions(tuning: Tuning) -> list[Question]:
    """Return every measurement not made yet, whether prices are close or not."""
    return questions(tuning, unmeasured_candidates(tuning))


def questions(tuning: Tuning, indices: Sequence[CandidateIndex]) -> list[Question]:
    """Return the distinct questions about these candidates, in order."""
    return list(dict.fromkeys(question_of(tuning.buckets[index], place) for index, place in indices))


def undecided_candidates(tuning: Tuning) -> list[CandidateIndex]:
    """Return the unmeasured candidates whose prices are close.

    If only one is close, it is returned if it crosses a network: prices ignore contention for cores.
    """
    undecided = set()
    for index, bucket in enumerate(tuning.buckets):
        least_s = min(candidate.predicted_s for candidate in bucket.candidates)
        close = [i for i, candidate in enumerate(bucket.candidates) if candidate.predicted_s <= CLOSE * least_s]
        if len(close) == 1:
            close = [bucket.chosen] if bucket.plan.crosses else []
        undecided |= {(index, place) for place in close}
    return [indices for indices in unmeasured_candidates(tuning) if indices in undecided]


def unmeasured_candidates(tuning: Tuning) -> list[CandidateIndex]:
    return [
        (index, place)
        for index, bucket in enumerate(tuning.buckets)
        for place, candidate in enumerate(bucket.candidates)
        if candidate.plan.phases and bucket.num_elements and place not in bucket.measured_places
    ]


def question_of(bucket: Bucket, place: int) -> Question:
    num_elements = min(bucket.num_elements, MEASURED_ELEMENTS)
    count = 1 if num_elements * bucket.element_bytes > PART_BYTES else STREAM
    return Question(bucket.candidates[place].plan, num_elements, bucket.dtype, count)


def with_measurements(tuning: Tuning, taken_s: Mapping[Question, float]) -> Tuning:
    """Return the tuning with measured seconds; `taken_s` is for all `count` all-reduces of a question together.

    While there are open questions, a measurement applies only to the candidates that need it, so a bucket whose plan is
    clear by price does not change because another bucket of the same size was undecided.  Later measurements apply to
    all candidates.  Earlier measurements stay.
    """
    measured_s: dict[CandidateIndex, float] = {}
    for index, place in undecided_candidates(tuning) or unmeasured_candidates(tuning):
        bucket = tuning.buckets[index]
        question = question_of(bucket, place)
        if question in taken_s:
            # A larger bucket fills and drains the pipeline only once too, so its time is scaled like its price.
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
    """Decide again for buckets with several measured candidates, then use one plan for all if that is as good.

    Two plans at once have twice as many connections, a cost that measuring single buckets does not show.
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
    """Return the bucket with this candidate chosen, if it was measured."""
    if place == bucket.chosen or place not in bucket.measured_places:
        return bucket
    reason = f"measured: {bucket.plan.name} is faster here, but one plan for all buckets is nearly as fast overall"
    return replace(bucket, chosen=place, reason=reason)


def drift(tuning: Tuning, links: Mapping[Axis, Link]) -> float:
    """Return the ratio of the predicted time over these links to that over the links of the tuning."""
    shape = tuning.topology.shape

    def total_s(known: Mapping[Axis, Link]) -> float:
        prices = [price(b.plan, shape, known, b.num_elements, b.element_bytes, tuning.in_parts) for b in tuning.buckets]
        return sum(sum(costs[:3]) for costs in prices)

    earlier_s = total_s(tuning.links)
    return total_s(links) / earlier_s if earlier_s else 1.0


def is_made_for(tuning: Tuning, topology: Topology, backward: RecordedBackward, candidates: Sequence[Plan]) -> bool:
    """Return True if a stored tuning fits these ranks and gradients and uses only these candidates."""
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
    """Return True if DDP makes the stored buckets with the stored caps."""
    names = [name for bucket in tuning.buckets for name in bucket.gradients]
    cut = ddp_buckets([of_name[name] for name in names], [int(cap_mb * MIB) for cap_mb in tuning.caps_mb])
    return sorted([names[index] for index in indices] for indices in cut) == sorted(b.gradients for b in tuning.buckets)
