"""Chooses buckets and plans for a run: measures the links, decides on rank 0 (planning.choosing), and tells the others.

A choice made by timing must not differ between ranks, nor between a run and its resumption: it is made once, broadcast,
and stored by whoever asked for it (planning.tuning.Tuning).
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megabatch.comm.dtypes import TORCH_DTYPES
from megabatch.comm.probe import AnyReducer, probe, time_plan
from megabatch.comm.settings import CommSettings
from megabatch.planning.backward import RecordedBackward
from megabatch.planning.choosing import Question, choose, confirm, drift, open_questions, with_measurements
from megabatch.planning.plan import Plan, axes_of
from megabatch.planning.tuning import Tuning


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
    tuning = broadcast(tuning, groups.parent)
    return broadcast(confirm(measure(reducer, tuning, open_questions(tuning))), groups.parent)


def measure(reducer: AnyReducer, tuning: Tuning, questions: Sequence[Question]) -> Tuning:
    """With what each of these takes, for a bucket alone.  All ranks call it."""
    reducer.groups.open(axes_of(question.plan for question in questions))  # rejected plans' have been closed
    taken_s = {
        question: time_plan(reducer, question.plan, question.num_elements, question.count, TORCH_DTYPES[question.dtype])
        for question in questions
    }
    return with_measurements(tuning, taken_s)


def broadcast(tuning: Tuning, group: Any) -> Tuning:
    """Rank 0's, on all ranks."""
    received = [tuning]
    dist.broadcast_object_list(received, group=group, group_src=0)
    return received[0]


def measure_drift(reducer: AnyReducer, stored: Tuning, settings: CommSettings) -> float:
    """By what factor a stored choice is predicted to take longer on the links as they are now."""
    links = probe(reducer, [bucket.plan for bucket in stored.buckets], settings.dtype)
    return drift(stored, links)
