"""The ranks of each node, and the groups of ranks that work together along an axis.

    axis         groups
    all          one: every rank
    node         one per node: its ranks
    leaders      one: the first rank of each node
    inter_node   one per local index i: the i-th rank of every node; only if nodes have equally many ranks

The ranks of a node need not be consecutive: some launchers assign ranks to nodes round-robin.  The members of a group
are ascending because torch sorts the ranks of a process group, so a rank has the same place in its group everywhere.

The cost of a plan depends only on how many ranks the nodes have.  A `ClusterShape` counts groups by size, so pricing
16,384 ranks takes no longer than two.  A `Topology` also has the rank numbers, which exchanging data needs.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Literal, Self

from msgspec import Struct

Axis = Literal["all", "node", "leaders", "inter_node"]
SizeCounts = tuple[tuple[int, int], ...]  # (size, number of that size), sizes ascending


class ClusterShape(Struct, frozen=True, dict=True):  # dict: cached properties
    """The numbers of ranks per node.  Every method takes time proportional to the number of distinct node sizes."""

    node_sizes: SizeCounts  # (ranks per node, number of such nodes)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.node_sizes]
        assert sizes and sizes == sorted(set(sizes)), f"node sizes must be distinct and ascending: {self.node_sizes}"
        assert all(size > 0 and count > 0 for size, count in self.node_sizes), self.node_sizes

    @classmethod
    def regular(cls, num_nodes: int, ranks_per_node: int) -> Self:
        return cls(((ranks_per_node, num_nodes),))

    @cached_property
    def num_ranks(self) -> int:
        return sum(size * count for size, count in self.node_sizes)

    @cached_property
    def num_nodes(self) -> int:
        return sum(count for _, count in self.node_sizes)

    @property
    def largest_node(self) -> int:
        return self.node_sizes[-1][0]

    @property
    def is_regular(self) -> bool:
        return len(self.node_sizes) == 1

    def group_sizes(self, axis: Axis) -> SizeCounts:
        """Return (members, number of such groups) along the axis."""
        match axis:
            case "all":
                return ((self.num_ranks, 1),)
            case "node":
                return self.node_sizes
            case "leaders":
                return ((self.num_nodes, 1),)
            case "inter_node":
                return ((self.num_nodes, self.largest_node),) if self.is_regular else ()

    def largest_group(self, axis: Axis) -> int:
        return max(size for size, _ in self.group_sizes(axis))


class Topology(Struct, frozen=True, dict=True):  # dict: cached properties
    nodes: tuple[tuple[int, ...], ...]  # ranks of each node, ascending; nodes in the order of their first rank

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        # Errors, not asserts: a topology is also read from files.
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError("every rank from 0 to the last must belong to exactly one node")
        if not all(self.nodes) or self.nodes != tuple(sorted(tuple(sorted(node)) for node in self.nodes)):
            raise ValueError("the ranks of a node must ascend, and nodes must be in the order of their first rank")

    @cached_property
    def shape(self) -> ClusterShape:
        return ClusterShape(tuple(sorted(Counter(map(len, self.nodes)).items())))

    @cached_property
    def num_ranks(self) -> int:
        return sum(map(len, self.nodes))

    @cached_property
    def in_node(self) -> dict[int, tuple[int, int]]:
        """The index of its node and its place in it, by rank."""
        return {rank: (number, place) for number, node in enumerate(self.nodes) for place, rank in enumerate(node)}

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def largest_node(self) -> int:
        return self.shape.largest_node

    @property
    def is_regular(self) -> bool:
        return self.shape.is_regular

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        match axis:
            case "all":
                return [tuple(range(self.num_ranks))]
            case "node":
                return list(self.nodes)
            case "leaders":
                return [tuple(node[0] for node in self.nodes)]
            case "inter_node":
                # Sorted: the i-th ranks of nodes (0, 3) and (1, 2) are 3 and 2.
                return [tuple(sorted(ranks)) for ranks in zip(*self.nodes, strict=True)] if self.is_regular else []

    def members(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of `rank` along `axis`; () if it takes no part."""
        number, place = self.in_node[rank]
        match axis:
            case "node":
                return self.nodes[number]
            case "inter_node":
                return tuple(sorted(node[place] for node in self.nodes)) if self.is_regular else ()
            case "leaders" if place:
                return ()
        return self.groups(axis)[0]

    def places(self, axis: Axis) -> dict[int, tuple[int, int]]:
        """Return, for every rank that takes part, its place in its group and the number of members."""
        if axis == "node":
            return self.places_in_node
        return {rank: (place, len(group)) for group in self.groups(axis) for place, rank in enumerate(group)}

    @cached_property
    def places_in_node(self) -> dict[int, tuple[int, int]]:
        return {rank: (place, len(node)) for node in self.nodes for place, rank in enumerate(node)}


def regular(num_nodes: int, ranks_per_node: int) -> Topology:
    """Return nodes of equal size with consecutive ranks."""
    starts = range(0, num_nodes * ranks_per_node, ranks_per_node)
    return Topology(tuple(tuple(range(start, start + ranks_per_node)) for start in starts))


def from_hosts(hosts: Sequence[Hashable]) -> Topology:
    """Return the topology, given the host of every rank in the order of ranks."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return Topology(tuple(map(tuple, nodes.values())))


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending ranks as the fewest runs [begin, end) of consecutive ranks."""
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return [(ranks[0], ranks[-1] + 1)]
    ends = [place for place in range(1, len(ranks)) if ranks[place] != ranks[place - 1] + 1]
    return [(ranks[begin], ranks[end - 1] + 1) for begin, end in zip([0, *ends], [*ends, len(ranks)], strict=True)]
