"""Run any plan on plain tensors, one per rank, and count the bytes that each rank sends to each other rank.

Messages are real tensors in the dtype of their phase, so the counts are exact.  Elements that a rank no longer holds
are overwritten with nan, which spreads to the result of a plan that uses them.
"""

from collections import Counter

import torch
from hypothesis import strategies as st
from torch import Tensor

from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.plan import COMM_DTYPES, CommDtype, Op, Phase, Plan, Transfer
from megabatch.planning.topology import Axis, Topology, from_hosts, regular
from tests.support.enumerated import all_transfers

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WITHOUT_SLICES: tuple[Op, ...] = ("all_reduce", "reduce", "broadcast")


class Oracle:
    def __init__(self, plan: Plan, topology: Topology, tensors: list[Tensor]) -> None:
        self.tensors = [tensor.clone() for tensor in tensors]
        self.bytes_between: Counter[tuple[int, int]] = Counter()  # sender, receiver
        for phase, groups in zip(plan.phases, all_transfers(plan, topology, tensors[0].numel()), strict=True):
            dtype = TORCH_DTYPES.get(phase.dtype, tensors[0].dtype)
            for group in groups:
                getattr(self, phase.op)(group, dtype)

    def all_reduce(self, group: Transfer, dtype: torch.dtype) -> None:
        self.reduce_scatter(group, dtype)
        self.all_gather(group, dtype)

    def reduce(self, group: Transfer, dtype: torch.dtype) -> None:
        self.reduce_scatter(group, dtype)
        first = group.members[0]
        for rank, (begin, end) in zip(group.members, group.slices, strict=True):
            self.tensors[first][begin:end] = self.send(rank, first, self.tensors[rank][begin:end].to(dtype))

    def broadcast(self, group: Transfer, dtype: torch.dtype) -> None:
        first = group.members[0]
        whole = self.tensors[first].clone().to(dtype)
        for rank, (begin, end) in zip(group.members, group.slices, strict=True):
            self.keep(rank, group, begin, self.send(first, rank, whole[begin:end]))
        self.all_gather(group, dtype)

    def reduce_scatter(self, group: Transfer, dtype: torch.dtype) -> None:
        sums = []
        for owner, (begin, end) in zip(group.members, group.slices, strict=True):
            arrived = [self.send(rank, owner, self.tensors[rank][begin:end].to(dtype)) for rank in group.members]
            total = arrived[0].to(torch.promote_types(dtype, torch.float32))
            for contribution in arrived[1:]:
                total = total + contribution
            sums.append(total.to(dtype))
        for owner, (begin, _), total in zip(group.members, group.slices, sums, strict=True):
            self.keep(owner, group, begin, total)

    def all_gather(self, group: Transfer, dtype: torch.dtype) -> None:
        for owner, (begin, end) in zip(group.members, group.slices, strict=True):
            part = self.tensors[owner][begin:end].to(dtype)
            for rank in group.members:
                self.tensors[rank][begin:end] = self.send(owner, rank, part)

    def send(self, source: int, target: int, message: Tensor) -> Tensor:
        if source != target:
            self.bytes_between[source, target] += message.nbytes
        return message.clone()

    def keep(self, rank: int, group: Transfer, begin: int, part: Tensor) -> None:
        """Store `part` in a rank and invalidate the transfer's other elements there."""
        self.tensors[rank][group.begin : group.end] = torch.nan
        self.tensors[rank][begin : begin + part.numel()] = part


def plans(topology: Topology) -> list[tuple[CommDtype, Plan]]:
    """Return all plans that apply to a topology, each with its dtype."""
    made = [(dtype, algorithm(topology.shape, dtype)) for algorithm in ALGORITHMS.values() for dtype in COMM_DTYPES]
    return [(dtype, plan) for dtype, plan in made if plan]


def every_plan(topology: Topology) -> list[Plan]:
    """Return the plans that apply, and others that no algorithm makes: single phases and nested slices on any axis."""
    axes: list[Axis] = ["all", "node", "leaders"]
    if topology.is_regular:
        axes.append("inter_node")
    single = [(Phase(op, axis, dtype),) for op in WITHOUT_SLICES for axis in axes for dtype in COMM_DTYPES]
    halves = [scattered((axis,), dtype) for axis in axes for dtype in COMM_DTYPES]
    deeper = [scattered(("node", "inter_node"), dtype) for dtype in COMM_DTYPES] if topology.is_regular else []
    is_consecutive = topology == regular(topology.num_nodes, topology.largest_node)
    if is_consecutive:  # otherwise the ranks of a node have different positions in their groups
        deeper.append(scattered(("inter_node", "node"), "bf16"))
        deeper.append(scattered(("inter_node",), "bf16", Phase("all_reduce", "node", "same")))
    return [plan for _, plan in plans(topology)] + [Plan("made up", phases) for phases in (*single, *halves, *deeper)]


def scattered(axes: tuple[Axis, ...], dtype: CommDtype, *between: Phase) -> tuple[Phase, ...]:
    """Return reduce-scatters along the axes, the phases `between`, and all-gathers in reverse order."""
    there = [Phase("reduce_scatter", axis, dtype) for axis in axes]
    back = [Phase("all_gather", axis, dtype) for axis in reversed(axes)]
    return (*there, *between, *back)


def regular_but_shuffled() -> st.SearchStrategy[Topology]:
    shapes = st.sampled_from([(nodes, ranks) for nodes in range(1, 7) for ranks in range(1, 7) if nodes * ranks <= 12])
    hosts = shapes.map(lambda shape: [str(node) for node in range(shape[0])] * shape[1])
    return hosts.flatmap(st.permutations).map(from_hosts)


def topologies() -> st.SearchStrategy[Topology]:
    """Draw 1 to 12 ranks in nodes of equal or different sizes, with ranks in any order of nodes."""
    unequal = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12).map(from_hosts)
    consecutive = st.integers(1, 12).flatmap(lambda ranks: st.integers(1, 12 // ranks).map(lambda n: regular(n, ranks)))
    return st.one_of(unequal, consecutive, regular_but_shuffled())


def element_counts() -> st.SearchStrategy[int]:
    """Draw zero, one, fewer than ranks, odd numbers, and numbers around a cache line for each rank."""
    return st.one_of(st.sampled_from([0, 1, 2, 3, 11, 12, 13, 191, 192, 193, 1000]), st.integers(0, 600))
