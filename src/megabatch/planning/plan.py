"""An all-reduce as a value: a plan is a list of phases, which executor, cost model, simulator and test oracle read.

A phase runs one operation in every group of its axis (topology.py), on the elements that the group holds:
    all_reduce       every member ends with the sum
    reduce           the first member ends with the sum; what the others hold means nothing until a broadcast
    broadcast        every member ends with what the first one holds
    reduce_scatter   member i ends with slice i of the sum, and holds only that slice from here on
    all_gather       undoes the last reduce_scatter: every member ends with all slices
A plan ends with every rank holding the whole sum, the same bits on all.

A phase's `dtype` is the dtype that travels.  fp32 stands for the tensor's own: nothing is rounded on the way, and an
fp64 tensor stays fp64.  With a 16-bit dtype every contribution is rounded to it once, the sum is made in fp32 in
ascending rank order, and rounded once; every member keeps the rounded values, the owner of a slice too (and its own
contribution is rounded like the others', so that the sum does not depend on who owns the slice).  Sums of 16-bit
tensors that travel as they are, are made in fp32 too, and rounded once a phase.

A phase with an `engine` is the backend's own sum instead, which rounds to that dtype at every hop.  Nobody takes it
unasked: `comm.algorithm=ring`.
"""

import math
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct

from megabatch.planning.topology import Axis, Topology

Op = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]
CommDtype = Literal["fp32", "bf16", "fp16"]
EngineSum = Literal["ring", "tree", "in_network"]  # engine.py
Slice = tuple[int, int]  # elements [begin, end)
Cut = Callable[[int, int, int], Slice]  # elements, parts, and the index of one of them

BLOCK = 16  # elements: a cache line of fp32
PLACES: dict[Axis, str] = {
    "all": "over all ranks",
    "node": "in the node",
    "leaders": "among leaders",
    "inter_node": "between nodes",
}

ENGINE_SUMS: dict[EngineSum, str] = {
    "ring": " by the backend's ring",
    "tree": " by the backend's tree",
    "in_network": " by the network's switches",
}


class DtypeFormat(NamedTuple):
    num_bytes: int  # per element
    roundoff: float  # the largest relative error of rounding to it
    underflow: float  # the largest absolute error below its normal numbers: half the smallest subnormal


COMM_DTYPES: dict[CommDtype, DtypeFormat] = {
    "fp32": DtypeFormat(4, 0.0, 0.0),
    "bf16": DtypeFormat(2, 2.0**-8, 2.0**-134),
    "fp16": DtypeFormat(2, 2.0**-11, 2.0**-25),
}


class Phase(Struct, frozen=True):
    op: Op
    axis: Axis
    dtype: CommDtype
    engine: EngineSum | None = None  # the backend's own sum, which rounds to the dtype at every hop

    def __str__(self) -> str:
        dtype = "" if self.dtype == "fp32" else f" in {self.dtype}"
        return f"{self.op} {PLACES[self.axis]}{dtype}{self.summed}"

    @property
    def summed(self) -> str:
        """By whom, if not by us, and what that does to 16 bits."""
        rounded = "" if self.dtype == "fp32" else ", rounded at every hop"
        return ENGINE_SUMS[self.engine] + rounded if self.engine else ""


class Plan(Struct, frozen=True, dict=True):  # dict: of what is computed once
    name: str
    phases: tuple[Phase, ...]

    @cached_property
    def network(self) -> slice:
        """The phases from the first that leaves the node to the last; empty, at the end, if none does."""
        places = [index for index, phase in enumerate(self.phases) if phase.axis != "node"]
        return slice(places[0], places[-1] + 1) if places else slice(len(self.phases), len(self.phases))

    @cached_property
    def crosses(self) -> bool:
        return bool(self.phases[self.network])

    @cached_property
    def is_engines(self) -> bool:
        """True if the backend sums, in any phase."""
        return any(phase.engine for phase in self.phases)

    @property
    def scattered(self) -> list[tuple[Axis, ...]]:
        """Of every phase, the axes along which each group holds but a slice: scattered and not gathered yet."""
        axes: tuple[Axis, ...] = ()
        result = []
        for phase in self.phases:
            if phase.op == "all_gather":
                assert axes[-1:] == (phase.axis,), f"{self}: {phase} undoes no reduce_scatter"
                axes = axes[:-1]
            result.append(axes)
            if phase.op == "reduce_scatter":
                axes = (*axes, phase.axis)
        return result

    def __str__(self) -> str:
        return f"{self.name}: " + (", ".join(map(str, self.phases)) or "nothing to exchange")


def axes_of(plans: Iterable[Plan]) -> set[Axis]:
    return {phase.axis for plan in plans for phase in plan.phases}


class Transfer(NamedTuple):
    """What one group does in one phase: its members exchange the elements [begin, end)."""

    members: tuple[int, ...]
    begin: int
    end: int

    @property
    def slices(self) -> list[Slice]:
        """Member i owns slice i."""
        parts = slices(self.end - self.begin, len(self.members))
        return [(self.begin + begin, self.begin + end) for begin, end in parts]


def slices(num_elements: int, parts: int) -> list[Slice]:
    """`parts` slices as equal as whole cache lines allow; as equal as elements allow if there are too few lines."""
    block, num_blocks = blocks_of(num_elements, parts)
    # Rounding down makes the last slice one of the largest, and the short block at the end falls into it.
    bounds = [min(num_elements, num_blocks * part // parts * block) for part in range(parts + 1)]
    return list(pairwise(bounds))


def slice_of(num_elements: int, parts: int, index: int) -> Slice:
    """slices(num_elements, parts)[index], without the others."""
    block, num_blocks = blocks_of(num_elements, parts)
    begin, end = num_blocks * index // parts * block, num_blocks * (index + 1) // parts * block
    return min(num_elements, begin), min(num_elements, end)


@lru_cache
def largest_slice(num_elements: int, parts: int) -> int:
    """The size of the largest of `slices`: the last one, or without its short block one of the others."""
    block, num_blocks = blocks_of(num_elements, parts)
    fullest = -(-num_blocks // parts) * block
    is_last_alone = num_blocks % parts == 1 or parts == 1
    return fullest - (num_blocks * block - num_elements) if is_last_alone else fullest


def blocks_of(num_elements: int, parts: int) -> tuple[int, int]:
    """Elements of a block, of which slices have whole numbers, and how many blocks there are; the last may be short."""
    block = BLOCK if num_elements >= BLOCK * parts else 1
    return block, -(-num_elements // block)


def padded_length(num_elements: int, parts: int) -> int:
    """Elements of each of `parts` equal slices: whole blocks, as many as it takes for all slices to hold them all.

    What is left over at the end is padding.  One collective of equal messages moves them, whatever `parts` is.
    """
    return -(-num_elements // (parts * BLOCK)) * BLOCK


def padded_slice_of(num_elements: int, parts: int, index: int) -> Slice:
    """The elements in the equal slice at this index: as many as there are left, perhaps none."""
    length = padded_length(num_elements, parts)
    return min(num_elements, index * length), min(num_elements, (index + 1) * length)


def transfers(
    plan: Plan, topology: Topology, rank: int, num_elements: int, cut: Cut = slice_of
) -> list[Transfer | None]:
    """For one rank, phase by phase: its group and the elements that this holds; None where the rank takes no part.

    `cut` is how reduce_scatters cut: `slice_of`, or `padded_slice_of`.
    """
    result: list[Transfer | None] = []
    for phase, axes in zip(plan.phases, plan.scattered, strict=True):
        members = topology.members(phase.axis, rank)
        places = [topology.places(axis) for axis in axes]
        # Who took no part in a reduce_scatter holds what it held: one slice of one.
        held = {held_by([of_axis.get(member, (0, 1)) for of_axis in places], num_elements, cut) for member in members}
        assert len(held) <= 1, f"{plan}: {members} hold different elements before {phase}"
        result.append(Transfer(members, *held.pop()) if held else None)
    return result


def held_by(places: Iterable[tuple[int, int]], num_elements: int, cut: Cut = slice_of) -> Slice:
    """The elements of a member after reduce_scatters in which it had these places among so many members."""
    begin, end = 0, num_elements
    for place, parts in places:
        first, last = cut(end - begin, parts, place)
        begin, end = begin + first, begin + last
    return begin, end


def error_bound(plan: Plan, num_ranks: int, magnitude: float, roundoff: float = 2.0**-24) -> float:
    """The most by which an element of the result differs from the exact sum.  p ranks, m = sum of |contributions|.

    ((1+u)^p (1+w)^2 - 1) m + (p+1) (1+u)^p (1+w)^2 t: u is the roundoff of the dtype that sums, once per addition
    (p-1 in any order, and one where an fp64 becomes fp32 on its way to 16 bits); w and t are roundoff and underflow of
    the dtype that travels, once per contribution and once for the result.  About 2w m, whatever p is, while a 16-bit
    ring that rounds at every hop has about p w m.  t matters for fp16 alone: contributions below 3e-8 vanish, so fp16
    wants a loss scale.  The bound holds while m is finite in that dtype (65,504 for fp16); beyond it every rank gets
    inf or nan.  The backend's own sum rounds to the dtype that travels after each of its p-1 additions, and each
    contribution once: about p w m.
    """
    rounded = [(COMM_DTYPES[phase.dtype], num_ranks if phase.engine else 2) for phase in plan.phases]
    # Logarithms, since 1 + 2**-53 is 1 in float64.
    growth = num_ranks * math.log1p(roundoff) + sum(count * math.log1p(format.roundoff) for format, count in rounded)
    underflow = (num_ranks + 1) * sum(format.underflow for format, _ in rounded)
    return math.expm1(growth) * magnitude + math.exp(growth) * underflow
