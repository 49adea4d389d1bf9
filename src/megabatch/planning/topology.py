"""Which ranks share a host, and which ranks work together along an axis.

    axis         its groups
    all          one: every rank
    node         one per node: the ranks of that host
    leaders      one: the first rank of each node
    inter_node   one per local index i: the i-th rank of every node; nodes of equal size only

Ranks of a node need not be consecutive: launchers also deal them out to hosts in turn.  The members of every
group are ascending, since torch sorts the ranks of a process group; a rank's place in its group is therefore
the same everywhere.

What a plan costs depends on how many ranks the nodes have, not on which: a `ClusterShape` counts groups by their size,
so 16,384 ranks are priced as fast as two.  A `Topology` names the ranks, for those that exchange data.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Literal, Self

from msgspec import Struct

Axis = Literal["all", "node", "leaders", "inter_node"]
SizeCounts = tuple[tuple[int, int], ...]  # (size, how many of that size), sizes ascending


class ClusterShape(Struct, frozen=True, dict=True):  # dict: of what is computed once
    """How many ranks the nodes have.  Everything here costs as much as there are different sizes of nodes."""

    node_sizes: SizeCounts  # (ranks of a node, how many such nodes)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.node_sizes]
        assert sizes and sizes == sorted(set(sizes)), f"sizes of nodes, each once and ascending: {self.node_sizes}"
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
        """Ranks in the largest node."""
        return self.node_sizes[-1][0]

    @property
    def is_regular(self) -> bool:
        """True if all nodes have equally many ranks."""
        return len(self.node_sizes) == 1

    def group_sizes(self, axis: Axis) -> SizeCounts:
        """(members, how many such groups) of the axis."""
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


class Topology(Struct, frozen=True, dict=True):  # dict: of what is computed once
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node, ascending; nodes in the order of their first rank

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        # Errors, not asserts: it is also read from files.
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError("every rank from 0 on belongs to one node")
        if not all(self.nodes) or self.nodes != tuple(sorted(tuple(sorted(node)) for node in self.nodes)):
            raise ValueError("the ranks of a node ascend, and nodes come in the order of their first rank")

    @cached_property
    def shape(self) -> ClusterShape:
        return ClusterShape(tuple(sorted(Counter(map(len, self.nodes)).items())))

    @cached_property
    def num_ranks(self) -> int:
        return sum(map(len, self.nodes))

    @cached_property
    def in_node(self) -> dict[int, tuple[int, int]]:
        """Of every rank, the number of its node, and its place there."""
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
        """The ranks that `rank` works with along `axis`, itself included; () if it takes no part."""
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
        """Of every rank that takes part: its place in its group, and how many members that has."""
        if axis == "node":
            return self.places_in_node
        return {rank: (place, len(group)) for group in self.groups(axis) for place, rank in enumerate(group)}

    @cached_property
    def places_in_node(self) -> dict[int, tuple[int, int]]:
        return {rank: (place, len(node)) for node in self.nodes for place, rank in enumerate(node)}


def regular(num_nodes: int, ranks_per_node: int) -> Topology:
    """Nodes of equal size, the ranks of each one after another."""
    starts = range(0, num_nodes * ranks_per_node, ranks_per_node)
    return Topology(tuple(tuple(range(start, start + ranks_per_node)) for start in starts))


def from_hosts(hosts: Sequence[Hashable]) -> Topology:
    """From the host of every rank, in the order of ranks."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return Topology(tuple(map(tuple, nodes.values())))


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ranks as runs [begin, end) of consecutive ones, as few as there are."""
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return [(ranks[0], ranks[-1] + 1)]
    ends = [place for place in range(1, len(ranks)) if ranks[place] != ranks[place - 1] + 1]
    return [(ranks[begin], ranks[end - 1] + 1) for begin, end in zip([0, *ends], [*ends, len(ranks)], strict=True)]
