"""Chooses buckets and plans for a run: measures the links, decides on rank 0 (planning.choosing), and tells the others.

A choice made by timing must not differ between ranks, nor between a run and its resumption: it is made once, broadcast,
and stored by whoever asked for it (planning.tuning.Tuning).
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from megabatch.comm.dtypes import TORCH_DTYPES
from megabatch.comm.groups import Groups
from megabatch.comm.probe import AnyReducer, probe, time_plan
from megabatch.comm.settings import CommSettings
from megabatch.planning.backward import RecordedBackward
from megabatch.planning.choosing import Question, choose, confirm, drift, open_questions, with_measurements
from megabatch.planning.plan import Plan, axes_of
from megabatch.planning.topology import regular
from megabatch.planning.tuning import Tuning
from megabatch.ranks.collectives import broadcast_text

ALONE = regular(1, 1)


def tune(reducer: AnyReducer, plans: Sequence[Plan], backward: RecordedBackward, settings: CommSettings) -> Tuning:
    """The choice among the plans for these gradients.  All ranks call it, and get the same."""
    groups = reducer.groups
    tuning = choose(
        backward,
        plans,
        groups.topology,
        probe(reducer, plans, settings.dtype),
        bucket_mb=None if settings.bucket_mb == "auto" else settings.bucket_mb,
        forced="" if settings.algorithm == "auto" else f"comm.algorithm={settings.algorithm}",
        in_parts=reducer.in_parts,
    )
    tuning = broadcast(tuning, groups)
    return broadcast(confirm(measure(reducer, tuning, open_questions(tuning))), groups)


def measure(reducer: AnyReducer, tuning: Tuning, questions: Sequence[Question]) -> Tuning:
    """With what each of these takes, for a bucket alone.  All ranks call it."""
    reducer.groups.open(axes_of(question.plan for question in questions))  # rejected plans' have been closed
    taken_s = {
        question: time_plan(reducer, question.plan, question.num_elements, question.count, TORCH_DTYPES[question.dtype])
        for question in questions
    }
    return with_measurements(tuning, taken_s)


def broadcast(tuning: Tuning, groups: Groups) -> Tuning:
    """Rank 0's, on all ranks: as JSON, as it is stored; each has the topology, which names all ranks."""
    shared = replace(tuning, topology=ALONE)
    text = broadcast_text(msgspec.json.encode(shared).decode(), groups.device, groups.parent)
    return replace(msgspec.json.decode(text, type=Tuning), topology=groups.topology)


def measure_drift(reducer: AnyReducer, stored: Tuning, settings: CommSettings) -> float:
    """By what factor a stored choice is predicted to take longer on the links as they are now."""
    links = probe(reducer, [bucket.plan for bucket in stored.buckets], settings.dtype)
    return drift(stored, links)
