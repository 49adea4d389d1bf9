"""Which ranks share a host, and which ranks work together along an axis.

    axis      its groups
    all       one: every rank
    node      one per node: the ranks of that host
    masters   one: the first rank of each node
    across    one per local index i: the i-th rank of every node; nodes of equal size only

Ranks of a node need not be consecutive: launchers also deal them out to hosts in turn.  The members of every
group are ascending, since torch sorts the ranks of a process group; a rank's place in its group is therefore
the same everywhere.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Axis = Literal["all", "node", "masters", "across"]


class Topology(Struct, frozen=True):
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node, ascending; nodes in the order of their first rank

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        assert ranks and ranks == list(range(len(ranks))), f"every rank from 0 belongs to one node: {self.nodes}"
        assert all(self.nodes) and self.nodes == tuple(sorted(tuple(sorted(node)) for node in self.nodes)), self.nodes

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def largest_node(self) -> int:
        """Ranks in the largest node."""
        return max(map(len, self.nodes))

    @property
    def is_regular(self) -> bool:
        """True if all nodes have equally many ranks."""
        return self.num_nodes * self.largest_node == self.num_ranks

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        match axis:
            case "all":
                return [tuple(range(self.num_ranks))]
            case "node":
                return list(self.nodes)
            case "masters":
                return [tuple(node[0] for node in self.nodes)]
            case "across":
                # Sorted: the i-th ranks of nodes (0, 3) and (1, 2) are 3 and 2.
                return [tuple(sorted(ranks)) for ranks in zip(*self.nodes, strict=True)] if self.is_regular else []

    def members(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` works with along `axis`, itself included; () if it takes no part."""
        return next((group for group in self.groups(axis) if rank in group), ())


def regular(num_nodes: int, ranks_per_node: int) -> Topology:
    """Nodes of equal size, the ranks of each one after another."""
    starts = range(0, num_nodes * ranks_per_node, ranks_per_node)
    return Topology(tuple(tuple(range(start, start + ranks_per_node)) for start in starts))


def from_hosts(hosts: Sequence[str]) -> Topology:
    """From the host of every rank, in the order of ranks."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return Topology(tuple(map(tuple, nodes.values())))
