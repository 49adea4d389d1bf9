"""Chooses fusion and plans for a run: measures the links, decides on rank 0, and tells the others.

A choice made by timing must not differ between ranks, nor between a run and its resumption: it is made once, shared,
and stored by whoever asked for it (planning.tuning.Tuning).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from megabatch.comm.probe import STREAM, probe, time_plan
from megabatch.comm.reducer import Reducer
from megabatch.comm.settings import CommSettings
from megabatch.planning.buckets import MIB, Gradient, ddp_buckets, ddp_caps, fuse
from megabatch.planning.pipeline import PART_BYTES
from megabatch.planning.plan import Plan
from megabatch.planning.topology import Axis
from megabatch.planning.tuning import Tuning, choose, confirm, drift, open_questions, price, with_measurements

IN_NODE_MB = 25.0  # fusion where nothing crosses a network: sums need the cores that backward needs, early or late
MEASURED_ELEMENTS = 16 * MIB  # a larger bucket is measured at this size: its parts follow each other like these


class Backward(NamedTuple):
    """A recorded backward pass: gradients in the order in which they appeared, and when."""

    names: Sequence[str]
    gradients: Sequence[Gradient]
    ready_s: Sequence[float]


def tune(reducer: Reducer, plans: Sequence[Plan], backward: Backward, settings: CommSettings) -> Tuning:
    """The choice among the plans for these gradients.  All ranks call it, and get the same."""
    groups = reducer.groups
    links = probe(reducer, axes_of(plans), settings.wire)
    fusion_mb = settings.fusion_mb
    if fusion_mb == "auto" and groups.topology.num_nodes == 1:
        fusion_mb = IN_NODE_MB
    forced = "" if settings.algorithm == "auto" else f"comm.algorithm={settings.algorithm}"
    choose_for = partial(choose, *backward, plans, groups.topology, links, forced=forced)
    gradients = backward.gradients
    tuning = choose_for(cut=None if fusion_mb == "auto" else fuse(gradients, int(fusion_mb * MIB)))
    caps_mb = ddp_caps(gradients, places(tuning, backward))
    if caps_mb is None:  # of several types, which have no common list: then as DDP cuts them
        largest = max(bucket.num_bytes for bucket in tuning.buckets)
        tuning, caps_mb = choose_for(cut=ddp_buckets(gradients, [largest])), [largest / MIB]
    tuning = msgspec.structs.replace(tuning, caps_mb=caps_mb)
    tuning = share(tuning, groups.parent)
    return share(confirm(measure(reducer, tuning, open_questions(tuning))), groups.parent)


def places(tuning: Tuning, backward: Backward) -> list[list[int]]:
    """The gradients of each bucket, by their place in backward."""
    place = {name: index for index, name in enumerate(backward.names)}
    return [[place[name] for name in bucket.gradients] for bucket in tuning.buckets]


def measure(reducer: Reducer, tuning: Tuning, calls: Iterable[tuple[int, int]]) -> Tuning:
    """With what each of these candidates (bucket, place) takes for its bucket alone.  All ranks call it."""
    measured_s: dict[tuple[int, int], float] = {}
    known: dict[tuple[Plan, int, str], float] = {}
    for index, place in calls:
        bucket = tuning.buckets[index]
        plan, num_elements = bucket.candidates[place].plan, min(bucket.num_elements, MEASURED_ELEMENTS)
        if not num_elements:
            continue
        if (plan, num_elements, bucket.dtype) not in known:
            dtype = getattr(torch, bucket.dtype.removeprefix("torch."))
            # Small ones in a row: ranks do not begin one at quite the same time.
            count = 1 if dtype.itemsize * num_elements > PART_BYTES else STREAM
            taken_s = time_plan(reducer, plan, num_elements, count, dtype)
            known[plan, num_elements, bucket.dtype] = taken_s / count
        # A larger bucket fills and empties the pipeline no more often: scaled as its price is.
        element_bytes = bucket.num_bytes // bucket.num_elements
        priced_s = sum(price(plan, tuning.topology, tuning.links, num_elements, element_bytes)[:3])
        growth = bucket.candidates[place].predicted_s / priced_s
        measured_s[index, place] = known[plan, num_elements, bucket.dtype] * growth
    return with_measurements(tuning, measured_s)


def share(tuning: Tuning, group: Any) -> Tuning:
    """Rank 0's, on all ranks."""
    shared = [tuning]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    return shared[0]


def measure_drift(reducer: Reducer, stored: Tuning, settings: CommSettings) -> float:
    """By what factor a stored choice is predicted to take longer on the links as they are now."""
    links = probe(reducer, axes_of(bucket.plan for bucket in stored.buckets), settings.wire)
    return drift(stored, links)


def axes_of(plans: Iterable[Plan]) -> set[Axis]:
    return {phase.axis for plan in plans for phase in plan.phases}
