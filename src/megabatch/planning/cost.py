"""What a plan costs: steps, bytes and seconds.  A group of p ranks, n elements in slices, the largest of L elements.

Every operation is one or two halves of p-1 steps; member i owns slice i, and exchanges directly with the others:
    reduce_scatter   i sends every other member its slice, and adds up p-1 arriving ones
    all_gather       i sends its slice to every other member
    gather           every member sends its slice to the first
    scatter          the first sends every other member its slice
all_reduce = reduce_scatter + all_gather, reduce = reduce_scatter + gather, broadcast = scatter + all_gather: 2(p-1)
steps each, from which come 2(p-1) for flat and 4(k-1) + 2(p/k-1) for hierarchical.  A ring needs as many steps and
as many bytes in all; where slices are unequal, single ranks of a ring differ by the inequality.

Seconds of a half: (p-1) alpha + (bytes of the busiest rank, sent or received) beta + (bytes it adds up) gamma.  The
busiest rank has (p-1) L elements, so a ring costs 2(p-1) alpha + 2(p-1)/p S beta + (p-1)/p S gamma when p divides n:
the formula of the paper's authors.  A phase ends with its slowest group, and the next one starts after it.

Groups are counted by their shape, members and elements, of which a phase has very few: no price depends on the number
of ranks.  Only `bytes_crossing` looks at every rank, once, since it answers for every node.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

from msgspec import Struct

from megabatch.planning.plan import COMM_DTYPES, Op, Phase, Plan, largest_slice, slice_of, transfers
from megabatch.planning.topology import Axis, ClusterShape, Topology, runs_of

Half = Literal["reduce_scatter", "all_gather", "gather", "scatter"]


class Link(Struct, frozen=True):
    """What a message costs along one axis.  That of "all" is the process group's, between nodes where there are."""

    alpha_s: float  # latency of one step
    beta_s_per_byte: float  # sending or receiving, in the dtype that travels
    gamma_s_per_byte: float  # adding up, in the tensor's dtype: sums are no smaller where 16 bits travel
    in_memory: bool = False  # members write each other's memory, so nothing is gathered at the first or sent out by it


OPS: dict[Op, tuple[Half, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce": ("reduce_scatter", "gather"),
    "broadcast": ("scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}


def steps(plan: Plan, shape: ClusterShape) -> int:
    """Messages that wait for each other; in a node, the largest one's."""
    return sum(len(OPS[phase.op]) * (shape.largest_group(phase.axis) - 1) for phase in plan.phases)


def seconds(
    plan: Plan, shape: ClusterShape, num_elements: int, links: Mapping[Axis, Link], element_bytes: int = 4
) -> float:
    return sum(phase_seconds(plan, shape, num_elements, links, element_bytes))


def phase_seconds(
    plan: Plan, shape: ClusterShape, num_elements: int, links: Mapping[Axis, Link], element_bytes: int = 4
) -> list[float]:
    """Seconds of each phase: one bucket's phase in the node can run under another's between nodes."""
    result = []
    for phase, sizes, num_slices in groups_of(plan, shape):
        link, held = links[phase.axis], largest_slice(num_elements, num_slices) if num_slices > 1 else num_elements
        result.append(max([group_seconds(phase, members, held, link, element_bytes) for members in sizes]))
    return result


class PhaseGroups(NamedTuple):
    phase: Phase
    sizes: list[int]  # the different numbers of members
    num_slices: int  # after a reduce_scatter each group holds one slice; the slowest one holds the largest


@cache
def groups_of(plan: Plan, shape: ClusterShape) -> list[PhaseGroups]:
    """Of every phase: what does not depend on the elements."""
    result = []
    for phase, scattered in zip(plan.phases, plan.scattered, strict=True):
        check_held(phase.axis, scattered, shape)
        # What the first member sends or receives is all but its own slice, which may grow by more than the elements.
        assert not scattered or phase.op not in ("reduce", "broadcast"), f"{plan}: no price for {phase} of slices"
        sizes = [members for members, _ in shape.group_sizes(phase.axis)]
        result.append(PhaseGroups(phase, sizes, math.prod(map(shape.largest_group, scattered))))
    return result


def check_held(axis: Axis, scattered: tuple[Axis, ...], shape: ClusterShape) -> None:
    """After a reduce_scatter the members of a group hold the same slice only if the other axis has groups of one size,
    which cross its own: node and inter_node, in equal nodes."""
    is_same = shape.is_regular and sorted((*scattered, axis)) == ["inter_node", "node"]
    assert is_same or not scattered, f"groups of {axis} hold different elements after reduce_scatter in {scattered}"


def group_seconds(phase: Phase, num_members: int, num_elements: int, link: Link, element_bytes: int) -> float:
    total_s, width = 0.0, travelling_bytes(phase, element_bytes)
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
    """Elements that the busiest member sends or receives, whichever is more: links carry both at once."""
    if half in ("gather", "scatter"):
        return num_elements - size_of_slice(num_elements, num_members, 0)
    return (num_members - 1) * largest_slice(num_elements, num_members)


def size_of_slice(num_elements: int, parts: int, index: int) -> int:
    begin, end = slice_of(num_elements, parts, index)
    return end - begin


def travelling_bytes(phase: Phase, element_bytes: int) -> int:
    """Bytes of one element on its way; fp32 is the tensor's own dtype."""
    return element_bytes if phase.dtype == "fp32" else COMM_DTYPES[phase.dtype].num_bytes


def bytes_sent(plan: Plan, topology: Topology, num_elements: int, rank: int, element_bytes: int = 4) -> int:
    """Bytes that `rank` sends, to the byte: unequal slices are counted as they are."""
    total = 0
    for phase, transfer in zip(plan.phases, transfers(plan, topology, rank, num_elements), strict=True):
        if transfer:
            members, begin, end = transfer
            num_sent = elements_sent(OPS[phase.op], end - begin, len(members), members.index(rank))
            total += num_sent * travelling_bytes(phase, element_bytes)
    return total


def elements_sent(halves: Iterable[Half], num_elements: int, num_members: int, place: int) -> int:
    """By the member at this place to all others."""
    num_own = size_of_slice(num_elements, num_members, place)
    return sum(elements_leaving(half, num_elements, num_members, 1, num_own, place == 0) for half in halves)


def elements_leaving(
    half: Half, num_elements: int, num_members: int, num_inside: int, num_own: int, has_first: bool
) -> int:
    """Sent directly by some members of a group, who own so many elements together, to the members that are not inside.

    Each inside sends what each outside owns; or what all inside own, to each outside; or to the first, or as the first.
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
    """Bytes that each node sends to others."""
    sent = [0] * topology.num_nodes
    for phase, scattered in zip(plan.phases, plan.scattered, strict=True):
        check_held(phase.axis, scattered, topology.shape)
        width = travelling_bytes(phase, element_bytes)
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
    """Elements that leave each node in the group of all ranks, in which rank i is member i.

    The backend's own all-reduce, and its gather of 16 bits, follow a ring in the order of ranks: to its successor a
    rank sends every slice but the one that ends there, its own sum or what the other has.  Our reduce_scatter of 16
    bits is a direct exchange.
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
        # The last rank of a run sends to another node, but from the last rank of all back to the first in its own.
        senders = [end - 1 for _, end in runs if end < num_ranks or not has_first]
        total = 0
        for half in OPS[phase.op]:
            if width > 2 or half == "all_gather" or phase.engine:
                kept_back = senders if half == "reduce_scatter" else [(rank + 1) % num_ranks for rank in senders]
                total += sum(num_elements - size_of_slice(num_elements, num_ranks, rank) for rank in kept_back)
            else:
                total += elements_leaving(half, num_elements, num_ranks, len(node), num_own, has_first)
        result.append(total)
    return result


def crossing_one_by_one(phase: Phase, groups: list[tuple[tuple[int, ...], int]]) -> list[int]:
    """Elements that leave each node in groups with one member of every node, in the order of nodes, and their elements.

    All that a member sends leaves its node, and a ring sends as much as a direct exchange.
    """
    num_nodes = len(groups[0][0])
    result = [0] * num_nodes
    known: dict[int, list[int]] = {}  # sent from each place, by the elements of a group, of which there are few
    for ranks, num_elements in groups:
        if num_elements not in known:
            places = range(num_nodes)
            known[num_elements] = [elements_sent(OPS[phase.op], num_elements, num_nodes, place) for place in places]
        place_of = {rank: place for place, rank in enumerate(sorted(ranks))}
        sent = known[num_elements]
        result = [total + sent[place_of[rank]] for total, rank in zip(result, ranks, strict=True)]
    return result


class Timing(NamedTuple):
    """What was measured along an axis: small all-reduces, and a gather and all-reduces of n elements, seconds each."""

    small_s: float
    gather_s: float
    sum_s: float
    num_halves: int  # of a sum: 2 is an all-reduce, 1 a reduce-scatter; a gather is one half


def fit_link(timing: Timing, num_members: int, num_elements: int, comm_bytes: int, element_bytes: int = 4) -> Link:
    """The link whose `group_seconds` are those that were measured, with elements of `comm_bytes` on their way.

    Sums that follow each other overlap, and may be faster than their bytes one after another: nothing is left for
    gamma then, and the sums alone decide beta.
    """
    steps = num_members - 1
    busiest = elements_of_busiest("all_gather", num_elements, num_members)
    alpha_s = timing.small_s / (timing.num_halves * steps)
    bytes_s = max(0.0, timing.gather_s - steps * alpha_s)  # of a half
    sum_s = max(0.0, timing.sum_s - timing.num_halves * steps * alpha_s)
    added_s = sum_s - timing.num_halves * bytes_s
    if added_s < 0:
        bytes_s, added_s = sum_s / timing.num_halves, 0.0
    return Link(alpha_s, bytes_s / (busiest * comm_bytes), added_s / (busiest * element_bytes))
