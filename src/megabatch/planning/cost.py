"""The cost of a plan: steps, bytes and seconds, in the alpha-beta-gamma model.

Legend: a group of p ranks; n elements, S bytes, cut into p slices, the largest of L elements.

Idea: every operation is one or two halves of p-1 steps.  Member i owns slice i and exchanges directly with the others:
    reduce_scatter   i sends every other member its slice, and adds the p-1 that arrive
    all_gather       i sends its slice to every other member
    gather           every member sends its slice to the first
    scatter          the first sends every other member its slice
all_reduce = reduce_scatter + all_gather, reduce = reduce_scatter + gather, broadcast = scatter + all_gather: 2(p-1)
steps each.  This gives 2(p-1) steps for flat and 4(k-1) + 2(p/k-1) for hierarchical.  A ring has the same number of
steps and of bytes in total; if slices are unequal, its ranks differ by that inequality.

A half takes (p-1) alpha + (bytes of the busiest rank, sent or received) beta + (bytes that it adds) gamma.  The busiest
rank has (p-1) L elements, so a ring takes 2(p-1) alpha + 2(p-1)/p S beta + (p-1)/p S gamma if p divides n.  A phase
ends with its slowest group, and the next one starts after it.

Cost: groups are counted by members and elements, and a phase has very few distinct groups, so pricing does not depend
on the number of ranks.  Only `bytes_crossing` visits every rank, once, because it returns bytes for every node.

Source: the ring formula is that of Jia et al. 2018.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

from msgspec import Struct

from megabatch.planning.plan import COMM_DTYPES, Op, Phase, Plan, largest_slice, slice_of
from megabatch.planning.topology import Axis, ClusterShape, Topology, runs_of

Half = Literal["reduce_scatter", "all_gather", "gather", "scatter"]


class Link(Struct, frozen=True):
    """The cost of a message along one axis.  The link of "all" is that of the whole process group."""

    alpha_s: float  # latency of one step
    beta_s_per_byte: float  # sending or receiving, in bytes of the comm dtype
    gamma_s_per_byte: float  # adding, in bytes of the tensor's dtype: a 16-bit comm dtype does not make sums smaller
    in_memory: bool = False  # members write each other's memory, so gather and scatter take no time


OPS: dict[Op, tuple[Half, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce": ("reduce_scatter", "gather"),
    "broadcast": ("scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}


def steps(plan: Plan, shape: ClusterShape) -> int:
    """Return the number of messages that wait for each other, in the largest group of each phase."""
    return sum(len(OPS[phase.op]) * (shape.largest_group(phase.axis) - 1) for phase in plan.phases)


def seconds(
    plan: Plan, shape: ClusterShape, num_elements: int, links: Mapping[Axis, Link], element_bytes: int = 4
) -> float:
    return sum(phase_seconds(plan, shape, num_elements, links, element_bytes))


def phase_seconds(
    plan: Plan, shape: ClusterShape, num_elements: int, links: Mapping[Axis, Link], element_bytes: int = 4
) -> list[float]:
    """Return the seconds of each phase.  One bucket's phase in the node can overlap with another's between nodes."""
    result = []
    for phase, sizes, num_slices in groups_of(plan, shape):
        link, held = links[phase.axis], largest_slice(num_elements, num_slices) if num_slices > 1 else num_elements
        result.append(max([group_seconds(phase, members, held, link, element_bytes) for members in sizes]))
    return result


class PhaseGroups(NamedTuple):
    phase: Phase
    sizes: list[int]  # distinct numbers of members
    num_slices: int  # after a reduce_scatter each group holds one slice; the slowest group holds the largest


@cache
def groups_of(plan: Plan, shape: ClusterShape) -> list[PhaseGroups]:
    """Return the part of each phase's price that does not depend on the number of elements."""
    result = []
    for phase, scattered in zip(plan.phases, plan.scattered, strict=True):
        check_held(phase.axis, scattered, shape)
        # The first member sends or receives all but its own slice, which can grow faster than the elements do.
        assert not scattered or phase.op not in ("reduce", "broadcast"), f"{plan}: no price for {phase} of slices"
        sizes = [members for members, _ in shape.group_sizes(phase.axis)]
        result.append(PhaseGroups(phase, sizes, math.prod(map(shape.largest_group, scattered))))
    return result


def check_held(axis: Axis, scattered: tuple[Axis, ...], shape: ClusterShape) -> None:
    """Assert that the members of a group hold the same slice.

    After a reduce_scatter this is true only across node and inter_node, in nodes of equal size.
    """
    is_same = shape.is_regular and sorted((*scattered, axis)) == ["inter_node", "node"]
    assert is_same or not scattered, f"groups of {axis} hold different elements after reduce_scatter in {scattered}"


def group_seconds(phase: Phase, num_members: int, num_elements: int, link: Link, element_bytes: int) -> float:
    total_s, width = 0.0, comm_bytes_of(phase, element_bytes)
    steps_s = (num_members - 1) * link.alpha_s
    for half in OPS[phase.op]:
        if link.in_memory and half in ("gather", "scatter"):
            continue
        num_busiest = elements_of_busiest(half, num_elements, num_members)
        total_s += steps_s
        total_s += num_busiest * width * link.beta_s_per_byte
        if half == "reduce_scatter":
            total_s += num_busiest * element_bytes * link.gamma_s_per_byte
    return total_s


def elements_of_busiest(half: Half, num_elements: int, num_members: int) -> int:
    """Return the elements that the busiest member sends or receives, the larger of the two: links are full duplex."""
    if half in ("gather", "scatter"):
        return num_elements - size_of_slice(num_elements, num_members, 0)
    return (num_members - 1) * largest_slice(num_elements, num_members)


def size_of_slice(num_elements: int, parts: int, index: int) -> int:
    begin, end = slice_of(num_elements, parts, index)
    return end - begin


def comm_bytes_of(phase: Phase, element_bytes: int) -> int:
    """Return the bytes of one element in the comm dtype; fp32 means the dtype of the tensor."""
    return element_bytes if phase.dtype == "same" else COMM_DTYPES[phase.dtype].num_bytes


def elements_sent(halves: Iterable[Half], num_elements: int, num_members: int, place: int) -> int:
    """Return the elements that the member at `place` sends to all others."""
    num_own = size_of_slice(num_elements, num_members, place)
    return sum(elements_leaving(half, num_elements, num_members, 1, num_own, place == 0) for half in halves)


def elements_leaving(
    half: Half, num_elements: int, num_members: int, num_inside: int, num_own: int, has_first: bool
) -> int:
    """Return the elements that some members of a group (inside) send directly to the others (outside).

    Args:
        num_inside: the number of members inside.
        num_own: the elements that the members inside own together.
        has_first: whether the first member of the group is inside.
    """
    match half:
        case "reduce_scatter":
            return num_inside * (num_elements - num_own)
        case "all_gather":
            return num_own * (num_members - num_inside)
        case "gather":
            return 0 if has_first else num_own
        case "scatter":
            return num_elements - num_own if has_first else 0


def bytes_crossing(plan: Plan, topology: Topology, num_elements: int, element_bytes: int = 4) -> list[int]:
    """Return the bytes that each node sends to others."""
    sent = [0] * topology.num_nodes
    for phase, scattered in zip(plan.phases, plan.scattered, strict=True):
        check_held(phase.axis, scattered, topology.shape)
        width = comm_bytes_of(phase, element_bytes)
        match phase.axis:
            case "node":
                continue
            case "all":
                crossing = crossing_among_all(phase, topology, num_elements, width)
            case "leaders":
                crossing = crossing_one_by_one(phase, [(topology.groups("leaders")[0], num_elements)])
            case "inter_node":
                parts = topology.largest_node if scattered else 1  # the i-th ranks hold slice i, or all hold all
                sizes = [size_of_slice(num_elements, parts, index % parts) for index in range(topology.largest_node)]
                crossing = crossing_one_by_one(phase, list(zip(zip(*topology.nodes, strict=True), sizes, strict=True)))
        sent = [before + width * num for before, num in zip(sent, crossing, strict=True)]
    return sent


def crossing_among_all(phase: Phase, topology: Topology, num_elements: int, width: int) -> list[int]:
    """Return the elements that leave each node in the group of all ranks, in which rank i is member i.

    The backend's all-reduce and its all-gather of 16-bit values follow a ring in the order of ranks: a rank sends its
    successor every slice except one, which is its own sum in the reduce-scatter and the successor's slice in the
    all-gather.  Our 16-bit reduce_scatter is a direct exchange.
    """
    num_ranks = topology.num_ranks
    result = []
    for node in topology.nodes:
        runs = runs_of(node)
        has_first = node[0] == 0
        bounds = [
            (slice_of(num_elements, num_ranks, a)[0], slice_of(num_elements, num_ranks, b - 1)[1]) for a, b in runs
        ]
        num_own = sum(end - begin for begin, end in bounds)
        # The last rank of a run sends to another node, unless it is the last of all and rank 0 is in the same node.
        senders = [end - 1 for _, end in runs if end < num_ranks or not has_first]
        total = 0
        for half in OPS[phase.op]:
            if width > 2 or half == "all_gather" or phase.backend:
                not_sent = senders if half == "reduce_scatter" else [(rank + 1) % num_ranks for rank in senders]
                total += sum(num_elements - size_of_slice(num_elements, num_ranks, rank) for rank in not_sent)
            else:
                total += elements_leaving(half, num_elements, num_ranks, len(node), num_own, has_first)
        result.append(total)
    return result


def crossing_one_by_one(phase: Phase, groups: list[tuple[tuple[int, ...], int]]) -> list[int]:
    """Return the elements that leave each node in groups with one member per node.

    Everything that a member sends leaves its node, and a ring sends as much as a direct exchange.

    Args:
        groups: for each group, its ranks in the order of nodes and the elements that it holds.
    """
    num_nodes = len(groups[0][0])
    result = [0] * num_nodes
    known: dict[int, list[int]] = {}  # elements sent from each place, by the elements of a group; few distinct keys
    for ranks, num_elements in groups:
        if num_elements not in known:
            places = range(num_nodes)
            known[num_elements] = [elements_sent(OPS[phase.op], num_elements, num_nodes, place) for place in places]
        place_of = {rank: place for place, rank in enumerate(sorted(ranks))}
        sent = known[num_elements]
        result = [total + sent[place_of[rank]] for total, rank in zip(result, ranks, strict=True)]
    return result


class Timing(NamedTuple):
    """Seconds measured along an axis: of a small all-reduce, and of an all-gather and an all-reduce of n elements."""

    small_s: float
    gather_s: float
    sum_s: float
    num_halves: int  # 2 if `sum_s` was measured in an all-reduce, 1 in a reduce-scatter


def fit_link(timing: Timing, num_members: int, num_elements: int, comm_bytes: int) -> Link:
    """Return the link whose `group_seconds` equal the measured ones, with `comm_bytes` per element sent.

    Consecutive all-reduces overlap and can take less time than their bytes one after another.  Then gamma is 0 and the
    all-reduces decide beta.
    """
    steps = num_members - 1
    busiest = elements_of_busiest("all_gather", num_elements, num_members)
    alpha_s = timing.small_s / (timing.num_halves * steps)
    bytes_s = max(0.0, timing.gather_s - steps * alpha_s)  # per half
    sum_s = max(0.0, timing.sum_s - timing.num_halves * steps * alpha_s)
    added_s = sum_s - timing.num_halves * bytes_s
    if added_s < 0:
        bytes_s, added_s = sum_s / timing.num_halves, 0.0
    return Link(alpha_s, bytes_s / (busiest * comm_bytes), added_s / (busiest * 4))  # summed in fp32
