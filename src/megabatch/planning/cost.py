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
"""

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Literal, NamedTuple

from msgspec import Struct

from megabatch.planning.plan import WIRES, Op, Phase, Plan, exchanges, slices
from megabatch.planning.topology import Axis, Topology

Half = Literal["reduce_scatter", "all_gather", "gather", "scatter"]


class Link(Struct, frozen=True):
    """What a message costs along one axis.  The link of "all" is that of the engine, across nodes where there are."""

    alpha_s: float  # latency of one step
    beta_s_per_byte: float  # sending or receiving, in the type that travels
    gamma_s_per_byte: float  # adding up, in the tensor's type: sums are no smaller for a 16-bit wire


OPS: dict[Op, tuple[Half, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce": ("reduce_scatter", "gather"),
    "broadcast": ("scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}


def steps(plan: Plan, topology: Topology) -> int:
    """Messages that wait for each other; in a node, the largest one's."""
    return sum(len(OPS[phase.op]) * (max(map(len, topology.groups(phase.axis))) - 1) for phase in plan.phases)


def bytes_sent(plan: Plan, topology: Topology, num_elements: int, rank: int, element_bytes: int = 4) -> int:
    """Bytes that `rank` sends, to the byte: unequal slices are counted as they are."""
    total = 0
    for phase, groups in zip(plan.phases, exchanges(plan, topology, num_elements), strict=True):
        for members, begin, end in groups:
            if rank in members:
                sizes = sizes_of(end - begin, len(members))
                index = members.index(rank)
                num_sent = sum(elements_sent(half, sizes, index) for half in OPS[phase.op])
                total += num_sent * travelling_bytes(phase, element_bytes)
    return total


def bytes_crossing(plan: Plan, topology: Topology, num_elements: int, element_bytes: int = 4) -> list[int]:
    """Bytes that each node sends to others."""
    node_of = {rank: index for index, node in enumerate(topology.nodes) for rank in node}
    sent = [0] * topology.num_nodes
    for phase, groups in zip(plan.phases, exchanges(plan, topology, num_elements), strict=True):
        width = travelling_bytes(phase, element_bytes)
        halves = {half: path_of(half, phase, width) for half in OPS[phase.op]}
        for members, begin, end in groups:
            sizes = sizes_of(end - begin, len(members))
            for (i, sender), (j, receiver) in permutations(enumerate(members), 2):
                if node_of[sender] != node_of[receiver]:
                    sent[node_of[sender]] += width * sum(count(half, sizes, i, j) for half, count in halves.items())
    return sent


def path_of(half: Half, phase: Phase, width: int) -> Callable[[Half, list[int], int, int], int]:
    """Over all ranks, the engine's own all-reduce, and its gather of 16 bits, follow a ring in the order of ranks.

    Elsewhere every member is in another node, or none is, and a ring sends as much as a direct exchange.
    """
    along_ring = phase.axis == "all" and (width > 2 or half == "all_gather")
    return elements_along_ring if along_ring else elements_between


def seconds(
    plan: Plan, topology: Topology, num_elements: int, links: Mapping[Axis, Link], element_bytes: int = 4
) -> float:
    return sum(phase_seconds(plan, topology, num_elements, links, element_bytes))


def phase_seconds(
    plan: Plan, topology: Topology, num_elements: int, links: Mapping[Axis, Link], element_bytes: int = 4
) -> list[float]:
    """Seconds of each phase: one bucket's phase in the node can run under another's across."""
    result = []
    for phase, groups in zip(plan.phases, exchanges(plan, topology, num_elements), strict=True):
        # Thousands of groups are of very few different sizes.
        shapes = {(len(members), end - begin) for members, begin, end in groups}
        result.append(max(group_seconds(phase, *shape, links[phase.axis], element_bytes) for shape in shapes))
    return result


def group_seconds(phase: Phase, num_members: int, num_elements: int, link: Link, element_bytes: int) -> float:
    sizes = sizes_of(num_elements, num_members)
    total_s = 0.0
    for half in OPS[phase.op]:
        num_busiest = elements_of_busiest(half, sizes)
        total_s += (num_members - 1) * link.alpha_s
        total_s += num_busiest * travelling_bytes(phase, element_bytes) * link.beta_s_per_byte
        total_s += num_busiest * element_bytes * link.gamma_s_per_byte if half == "reduce_scatter" else 0.0
    return total_s


def elements_sent(half: Half, sizes: list[int], member: int) -> int:
    return sum(elements_between(half, sizes, member, other) for other in range(len(sizes)) if other != member)


def elements_between(half: Half, sizes: list[int], sender: int, receiver: int) -> int:
    match half:
        case "reduce_scatter":
            return sizes[receiver]
        case "all_gather":
            return sizes[sender]
        case "gather":
            return sizes[sender] if receiver == 0 else 0
        case "scatter":
            return sizes[receiver] if sender == 0 else 0


def elements_along_ring(half: Half, sizes: list[int], sender: int, receiver: int) -> int:
    """To its successor a member sends every slice but the one that ends there: its own sum, or what the other has."""
    if receiver != (sender + 1) % len(sizes):
        return 0
    return sum(sizes) - sizes[sender if half == "reduce_scatter" else receiver]


def elements_of_busiest(half: Half, sizes: list[int]) -> int:
    """Elements that the busiest member sends or receives, whichever is more: links carry both at once."""
    return sum(sizes) - sizes[0] if half in ("gather", "scatter") else (len(sizes) - 1) * max(sizes)


def sizes_of(num_elements: int, parts: int) -> list[int]:
    return [end - begin for begin, end in slices(num_elements, parts)]


def travelling_bytes(phase: Phase, element_bytes: int) -> int:
    """Bytes of one element on the wire; fp32 is the tensor's own type."""
    return element_bytes if phase.wire == "fp32" else WIRES[phase.wire].num_bytes


class Timing(NamedTuple):
    """What was measured along an axis: small sums, and a gather and sums of n elements, seconds each."""

    small_s: float
    gather_s: float
    sum_s: float
    num_halves: int  # of a sum: 2 is an all-reduce, 1 a reduce-scatter; a gather is one half


def fit_link(timing: Timing, num_members: int, num_elements: int, wire_bytes: int, element_bytes: int = 4) -> Link:
    """The link whose `group_seconds` are those that were measured.

    Sums that follow each other overlap, and may be faster than their bytes one after another: nothing is left for
    gamma then, and the sums alone decide beta.
    """
    steps = num_members - 1
    busiest = elements_of_busiest("all_gather", sizes_of(num_elements, num_members))
    alpha_s = timing.small_s / (timing.num_halves * steps)
    bytes_s = max(0.0, timing.gather_s - steps * alpha_s)  # of a half
    sum_s = max(0.0, timing.sum_s - timing.num_halves * steps * alpha_s)
    added_s = sum_s - timing.num_halves * bytes_s
    if added_s < 0:
        bytes_s, added_s = sum_s / timing.num_halves, 0.0
    return Link(alpha_s, bytes_s / (busiest * wire_bytes), added_s / (busiest * element_bytes))
