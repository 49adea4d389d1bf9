"""The cost model by enumeration of every group of every phase, and of every pair of ranks in it.

This is the reference for the closed forms in megabatch.planning, which count groups by shape.  It is meant for small
clusters.
"""

from collections.abc import Callable, Mapping
from itertools import permutations

from megabatch.planning.cost import OPS, Half, Link
from megabatch.planning.plan import COMM_DTYPES, Phase, Plan, Slice, Transfer, slices
from megabatch.planning.topology import Axis, Topology


def all_transfers(plan: Plan, topology: Topology, num_elements: int) -> list[list[Transfer]]:
    """Return the transfer of each group, for every phase."""
    held: list[list[Slice]] = [[(0, num_elements)] for _ in range(topology.num_ranks)]
    result = []
    for phase in plan.phases:
        at_work = []
        for members in topology.groups(phase.axis):
            if phase.op == "all_gather":
                for rank in members:
                    held[rank].pop()
            ranges = {held[rank][-1] for rank in members}
            assert len(ranges) == 1, f"{plan}: {members} hold different elements before {phase}"
            transfer = Transfer(members, *ranges.pop())
            if phase.op == "reduce_scatter":
                for rank, part in zip(members, transfer.slices, strict=True):
                    held[rank].append(part)
            at_work.append(transfer)
        result.append(at_work)
    return result


def steps(plan: Plan, topology: Topology) -> int:
    return sum(len(OPS[phase.op]) * (max(map(len, topology.groups(phase.axis))) - 1) for phase in plan.phases)


def bytes_sent(plan: Plan, topology: Topology, num_elements: int, rank: int, element_bytes: int = 4) -> int:
    total = 0
    for phase, groups in zip(plan.phases, all_transfers(plan, topology, num_elements), strict=True):
        for members, begin, end in groups:
            if rank in members:
                sizes, index = sizes_of(end - begin, len(members)), members.index(rank)
                for half in OPS[phase.op]:
                    others = [other for other in range(len(members)) if other != index]
                    num_sent = sum(elements_between(half, sizes, index, other) for other in others)
                    total += num_sent * bytes_of_element(phase, element_bytes)
    return total


def bytes_crossing(plan: Plan, topology: Topology, num_elements: int, element_bytes: int = 4) -> list[int]:
    """Return the number of bytes that each node sends to other nodes."""
    node_of = {rank: index for index, node in enumerate(topology.nodes) for rank in node}
    sent = [0] * topology.num_nodes
    for phase, groups in zip(plan.phases, all_transfers(plan, topology, num_elements), strict=True):
        width = bytes_of_element(phase, element_bytes)
        halves = {half: path_of(half, phase, width) for half in OPS[phase.op]}
        for members, begin, end in groups:
            sizes = sizes_of(end - begin, len(members))
            for (i, sender), (j, receiver) in permutations(enumerate(members), 2):
                if node_of[sender] != node_of[receiver]:
                    sent[node_of[sender]] += width * sum(count(half, sizes, i, j) for half, count in halves.items())
    return sent


def path_of(half: Half, phase: Phase, width: int) -> Callable[[Half, list[int], int, int], int]:
    """Return the function that counts the elements sent between two members.

    On the axis "all", the backend's all-reduce and its 16-bit all-gather follow a ring in the order of ranks.  On the
    other axes either all members share a node or no two do, and a ring sends as much as a direct exchange.
    """
    along_ring = phase.axis == "all" and (width > 2 or half == "all_gather")
    return elements_along_ring if along_ring else elements_between


def phase_seconds(
    plan: Plan, topology: Topology, num_elements: int, links: Mapping[Axis, Link], element_bytes: int = 4
) -> list[float]:
    """Return the time of the slowest group of each phase."""
    return [
        max(
            group_seconds(phase, sizes_of(end - begin, len(members)), links[phase.axis], element_bytes)
            for members, begin, end in groups
        )
        for phase, groups in zip(plan.phases, all_transfers(plan, topology, num_elements), strict=True)
    ]


def group_seconds(phase: Phase, sizes: list[int], link: Link, element_bytes: int) -> float:
    total_s = 0.0
    for half in OPS[phase.op]:
        num_busiest = elements_of_busiest(half, sizes)
        total_s += (len(sizes) - 1) * link.alpha_s
        total_s += num_busiest * bytes_of_element(phase, element_bytes) * link.beta_s_per_byte
        total_s += num_busiest * element_bytes * link.gamma_s_per_byte if half == "reduce_scatter" else 0.0
    return total_s


def elements_of_busiest(half: Half, sizes: list[int]) -> int:
    """Return the largest number of elements that any member sends or receives, from every pair of members."""
    members = range(len(sizes))
    sent = [sum(elements_between(half, sizes, i, j) for j in members if j != i) for i in members]
    received = [sum(elements_between(half, sizes, j, i) for j in members if j != i) for i in members]
    return max(*sent, *received)


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
    """Count the elements on a ring: a member sends its successor all slices but one.

    A reduce-scatter leaves out the slice that the sender owns, an all-gather the one that the receiver owns.
    """
    if receiver != (sender + 1) % len(sizes):
        return 0
    return sum(sizes) - sizes[sender if half == "reduce_scatter" else receiver]


def sizes_of(num_elements: int, parts: int) -> list[int]:
    return [end - begin for begin, end in slices(num_elements, parts)]


def bytes_of_element(phase: Phase, element_bytes: int) -> int:
    return element_bytes if phase.dtype == "same" else COMM_DTYPES[phase.dtype].num_bytes
