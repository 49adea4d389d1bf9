"""Choose buckets and plans for a run: measure the links, choose on rank 0 (planning.choosing), broadcast the choice.

A choice that depends on timing must be the same on all ranks and in a resumed run.  So it is made once, broadcast, and
stored by the caller (planning.tuning.Tuning).
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from megabatch.comm.accelerator.streams import StreamReducer
from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.cpu.workers import Reducer
from megabatch.comm.groups import Groups
from megabatch.comm.layouts import TORCH_DTYPES
from megabatch.comm.settings import CommSettings
from megabatch.planning.choosing import STREAM, Question, choose, confirm, drift, open_questions, with_measurements
from megabatch.planning.cost import Link, Timing, fit_link
from megabatch.planning.pipeline import PART_BYTES, RecordedBackward
from megabatch.planning.plan import COMM_DTYPES, BackendAlgorithm, CommDtype, Phase, Plan, axes_of
from megabatch.planning.topology import Axis, regular
from megabatch.planning.tuning import Tuning
from megabatch.ranks.collectives import broadcast_text

# Measuring the links: alpha, beta and gamma along each axis, with small and large messages like those of the reducer.
#
# Three times are measured along an axis of groups of p members (`fit_link` inverts the formulas of cost.py):
#     small all-reduces  tensors of 1,024 elements in sequence: only latency
#     large all-gather   a part of a bucket, each member sends its slice: latency and bytes
#     large all-reduces  parts of a bucket in sequence: latency, bytes and additions (and rounding to 16 bits)
# All groups of an axis run at the same time, as in a step, because the ranks of a node share its network and cores.
# To reduce noise, a time is that of the slowest rank, and the median of several rounds.

ROUNDS = 5
SMALL = 1024  # elements
SMALL_IN_NODE = 50
FIRST_KEY = -1_000  # keys of measured tensors count down from here; buckets and metrics have larger keys

AnyReducer = Reducer | StreamReducer


def probe(reducer: AnyReducer, plans: Iterable[Plan], dtype: CommDtype) -> dict[Axis, Link]:
    """Return the link along each axis of these plans.  All ranks call it and get the same result."""
    phases = {phase.axis: phase for plan in plans for phase in plan.phases}
    return {axis: probe_axis(reducer, axis, dtype, phases[axis].backend) for axis in sorted(phases)}


def probe_axis(reducer: AnyReducer, axis: Axis, dtype: CommDtype, algorithm: BackendAlgorithm | None) -> Link:
    topology = reducer.groups.topology
    num_members = topology.shape.largest_group(axis)
    # Between nodes, each rank of a node sends its slice of a part.
    large = PART_BYTES // 4 // (topology.largest_node if axis == "inter_node" else 1)
    free_bytes = reducer.groups.shareable_bytes
    if axis == "node" and free_bytes is not None:  # a container may have little shared memory
        large = max(2 * SMALL, min(large, free_bytes // (16 * topology.largest_node)))
    if axis == "node":
        timing = Timing(
            small_s=time_in_node(reducer, "reduce_scatter", SMALL),
            gather_s=time_in_node(reducer, "all_gather", large),
            sum_s=time_in_node(reducer, "reduce_scatter", large),
            num_halves=1,
        )
        link = fit_link(timing, num_members, large, comm_bytes=4)
        return replace(link, in_memory=reducer.groups.memory is not None)
    timing = Timing(
        small_s=time_all_reduces(reducer, Phase("all_reduce", axis, dtype, algorithm), SMALL),
        gather_s=time_gather(reducer, axis, dtype, large),
        sum_s=time_all_reduces(reducer, Phase("all_reduce", axis, dtype, algorithm), large),
        num_halves=2,
    )
    return fit_link(timing, num_members, large, comm_bytes=COMM_DTYPES[dtype].num_bytes)


def time_in_node(reducer: AnyReducer, op: str, num_elements: int) -> float:
    groups, tensor = reducer.groups, torch.zeros(num_elements, device=reducer.groups.device)
    if groups.memory:
        run = partial(getattr(groups.memory, op), groups.memory.share(tensor))
    elif "node" in groups.process_groups:
        run = partial(getattr(groups.process_groups["node"], op), tensor, "same")
    else:  # the only rank of its node
        run = partial(int)
    # Many small operations, because ranks leave the barrier up to a millisecond apart.
    count = SMALL_IN_NODE if num_elements == SMALL else STREAM

    def run_all() -> None:
        with reducer.stream_of("node"):
            for _ in range(count):
                run()

    return slowest_s(reducer, run_all) / count


def time_gather(reducer: AnyReducer, axis: Axis, dtype: CommDtype, num_elements: int) -> float:
    group = reducer.groups.process_groups.get(axis)  # None: this rank is not a member
    element = TORCH_DTYPES["fp32" if dtype == "same" else dtype]
    tensor = torch.zeros(num_elements, dtype=element, device=reducer.groups.device)

    def gather() -> None:
        with reducer.stream_of(axis):
            if group:
                group.gather(tensor)

    return slowest_s(reducer, gather)


def time_all_reduces(reducer: AnyReducer, phase: Phase, num_elements: int) -> float:
    plan = Plan(f"probe {phase.axis}", (phase,))
    return time_plan(reducer, plan, num_elements, STREAM) / STREAM


def time_plan(
    reducer: AnyReducer, plan: Plan, num_elements: int, count: int, dtype: torch.dtype = torch.float32
) -> float:
    """Return the seconds of `count` all-reduces in sequence."""
    tensors = [torch.zeros(num_elements, dtype=dtype, device=reducer.groups.device) for _ in range(count)]

    def reduce_all() -> None:
        futures = []
        for index, tensor in enumerate(tensors):
            key = FIRST_KEY - index
            header = BarrierHeader(0, key, num_elements)
            futures.append(reducer.start(key, tensor, plan, header, None, is_last=index == count - 1))
        for future in futures:
            future.wait()
        reducer.failure.raise_error()

    elapsed_s = slowest_s(reducer, reduce_all)
    for index in range(count):  # frees shared memory for the buckets
        reducer.forget(FIRST_KEY - index)
    return elapsed_s


def slowest_s(reducer: AnyReducer, action: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank, as the median over rounds after one warm-up round."""
    device, parent = reducer.groups.device, reducer.groups.parent
    times_s = []
    for _ in range(ROUNDS + 1):
        dist.barrier(group=parent)
        start_s = time.perf_counter()
        action()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    slowest = torch.tensor(times_s[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=parent)
    return float(statistics.median(slowest.tolist()))


ONE_RANK = regular(1, 1)


def tune(reducer: AnyReducer, plans: Sequence[Plan], backward: RecordedBackward, settings: CommSettings) -> Tuning:
    """Choose among the plans for these gradients.  All ranks call it and get the same result."""
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
    """Return the tuning with the measured seconds of each question, for a single bucket.  All ranks call it."""
    reducer.groups.open(axes_of(question.plan for question in questions))  # the groups of rejected plans are closed
    measured_s = {
        question: time_plan(reducer, question.plan, question.num_elements, question.count, TORCH_DTYPES[question.dtype])
        for question in questions
    }
    return with_measurements(tuning, measured_s)


def broadcast(tuning: Tuning, groups: Groups) -> Tuning:
    """Return rank 0's tuning on all ranks.  The topology is not sent: it is long, and every rank has it."""
    shared = replace(tuning, topology=ONE_RANK)
    text = broadcast_text(msgspec.json.encode(shared).decode(), groups.device, groups.parent)
    return replace(msgspec.json.decode(text, type=Tuning), topology=groups.topology)


def measure_drift(reducer: AnyReducer, stored: Tuning, settings: CommSettings) -> float:
    """Return the predicted time of a stored choice on the current links, relative to when it was made."""
    links = probe(reducer, [bucket.plan for bucket in stored.buckets], settings.dtype)
    return drift(stored, links)
