"""An all-reduce as a value: a plan is a list of phases, read by executor, cost model, simulator and test oracle.

A phase runs one operation in every group of its axis (topology.py), on the elements that the group holds:
    all_reduce       every member ends with the sum
    reduce           the first member ends with the sum; the values of the others are undefined until a broadcast
    broadcast        every member ends with the values of the first
    reduce_scatter   member i ends with slice i of the sum, and holds only that slice from here on
    all_gather       reverses the last reduce_scatter: every member ends with all slices
At the end of a plan every rank holds the whole sum, bitwise identical.

The `dtype` of a phase is the comm dtype.  "same" means the dtype of the tensor: nothing is rounded for sending, and an
fp64 tensor stays fp64.  With a 16-bit comm dtype every contribution is rounded once, added in fp32 in ascending rank
order, and the sum is rounded once.  Every member keeps the rounded values.  The owner of a slice also rounds its own
contribution, so the sum does not depend on which rank owns the slice.  16-bit tensors sent unchanged are also added in
fp32, and rounded once per phase.

A phase with a `backend` uses the backend's all-reduce instead, which rounds to the comm dtype at every hop.  It is used
only on request (`comm.algorithm=ring`).
"""

import math
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct, field

from megabatch.planning.topology import Axis, Topology

Op = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]
CommDtype = Literal["same", "bf16", "fp16"]
BackendAlgorithm = Literal["ring", "tree", "in_network"]  # backend_cost.py
Slice = tuple[int, int]  # elements [begin, end)
Cut = Callable[[int, int, int], Slice]  # (num_elements, parts, index) -> slice

BLOCK = 16  # elements: a cache line of fp32
AXIS_NAMES: dict[Axis, str] = {
    "all": "over all ranks",
    "node": "in the node",
    "leaders": "among leaders",
    "inter_node": "between nodes",
}

BACKEND_ALGORITHMS: dict[BackendAlgorithm, str] = {
    "ring": " by the backend's ring",
    "tree": " by the backend's tree",
    "in_network": " by the network's switches",
}


class DtypeFormat(NamedTuple):
    num_bytes: int  # per element
    roundoff: float  # largest relative error of rounding
    underflow: float  # largest absolute error below the normal numbers: half the smallest subnormal


COMM_DTYPES: dict[CommDtype, DtypeFormat] = {
    "same": DtypeFormat(4, 0.0, 0.0),  # of an fp32 tensor
    "bf16": DtypeFormat(2, 2.0**-8, 2.0**-134),
    "fp16": DtypeFormat(2, 2.0**-11, 2.0**-25),
}


class Phase(Struct, frozen=True):
    op: Op
    axis: Axis
    dtype: CommDtype
    # The backend's all-reduce, which rounds to the dtype at every hop.  In JSON it is called engine.
    backend: BackendAlgorithm | None = field(default=None, name="engine")

    def __str__(self) -> str:
        dtype = "" if self.dtype == "same" else f" in {self.dtype}"
        backend = BACKEND_ALGORITHMS[self.backend] if self.backend else ""
        rounding = ", rounded at every hop" if self.backend and self.dtype != "same" else ""
        return f"{self.op} {AXIS_NAMES[self.axis]}{dtype}{backend}{rounding}"


class Plan(Struct, frozen=True, dict=True):  # dict: cached properties
    name: str
    phases: tuple[Phase, ...]

    @cached_property
    def network(self) -> slice:
        """The phases from the first to the last that leave the node; an empty slice at the end if none does."""
        places = [index for index, phase in enumerate(self.phases) if phase.axis != "node"]
        return slice(places[0], places[-1] + 1) if places else slice(len(self.phases), len(self.phases))

    @cached_property
    def crosses(self) -> bool:
        return bool(self.phases[self.network])

    @cached_property
    def is_backends(self) -> bool:
        """True if the backend's all-reduce runs in any phase."""
        return any(phase.backend for phase in self.phases)

    @property
    def scattered(self) -> list[tuple[Axis, ...]]:
        """The axes, for every phase, along which each group holds only a slice: scattered and not gathered yet."""
        axes: tuple[Axis, ...] = ()
        result = []
        for phase in self.phases:
            if phase.op == "all_gather":
                assert axes[-1:] == (phase.axis,), f"{self}: {phase} follows no reduce_scatter"
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
    """The work of one group in one phase: its members exchange the elements [begin, end)."""

    members: tuple[int, ...]
    begin: int
    end: int

    @property
    def slices(self) -> list[Slice]:
        """The slice that each member owns."""
        parts = slices(self.end - self.begin, len(self.members))
        return [(self.begin + begin, self.begin + end) for begin, end in parts]


def slices(num_elements: int, parts: int) -> list[Slice]:
    """Cut into slices that are as equal as whole cache lines allow, or as elements allow if there are too few lines."""
    block, num_blocks = blocks_of(num_elements, parts)
    # Rounding down makes the last slice one of the largest, and the short block at the end falls into it.
    bounds = [min(num_elements, num_blocks * part // parts * block) for part in range(parts + 1)]
    return list(pairwise(bounds))


def slice_of(num_elements: int, parts: int, index: int) -> Slice:
    """Return slices(num_elements, parts)[index] without computing the others."""
    block, num_blocks = blocks_of(num_elements, parts)
    begin, end = num_blocks * index // parts * block, num_blocks * (index + 1) // parts * block
    return min(num_elements, begin), min(num_elements, end)


@lru_cache
def largest_slice(num_elements: int, parts: int) -> int:
    """Return the size of the largest slice: the last one, or another if the last has the short block."""
    block, num_blocks = blocks_of(num_elements, parts)
    fullest = -(-num_blocks // parts) * block
    only_last_is_full = num_blocks % parts == 1 or parts == 1
    return fullest - (num_blocks * block - num_elements) if only_last_is_full else fullest


def blocks_of(num_elements: int, parts: int) -> tuple[int, int]:
    """Return the elements per block and the number of blocks.  Slices are whole blocks; the last block may be short."""
    block = BLOCK if num_elements >= BLOCK * parts else 1
    return block, -(-num_elements // block)


def padded_length(num_elements: int, parts: int) -> int:
    """Return the length of `parts` equal slices of whole blocks that together hold all elements.

    The rest of the last slices is padding.  Equal slices travel in one collective of equal messages.
    """
    return -(-num_elements // (parts * BLOCK)) * BLOCK


def padded_slice_of(num_elements: int, parts: int, index: int) -> Slice:
    """Return the elements in the equal slice at this index, without its padding; it may be empty."""
    length = padded_length(num_elements, parts)
    return min(num_elements, index * length), min(num_elements, (index + 1) * length)


def transfers(
    plan: Plan, topology: Topology, rank: int, num_elements: int, cut: Cut = slice_of
) -> list[Transfer | None]:
    """Return, for each phase, the group of one rank and the elements that it holds; None if the rank takes no part.

    Args:
        cut: how a reduce_scatter cuts, `slice_of` or `padded_slice_of`.
    """
    result: list[Transfer | None] = []
    for phase, axes in zip(plan.phases, plan.scattered, strict=True):
        members = topology.members(phase.axis, rank)
        places = [topology.places(axis) for axis in axes]
        # A rank that took no part in a reduce_scatter still holds everything: one slice of one.
        held = {held_by([of_axis.get(member, (0, 1)) for of_axis in places], num_elements, cut) for member in members}
        assert len(held) <= 1, f"{plan}: {members} hold different elements before {phase}"
        result.append(Transfer(members, *held.pop()) if held else None)
    return result


def held_by(places: Iterable[tuple[int, int]], num_elements: int, cut: Cut = slice_of) -> Slice:
    """Return the elements that a member holds after reduce_scatters, given its (place, number of members) in each."""
    begin, end = 0, num_elements
    for place, parts in places:
        first, last = cut(end - begin, parts, place)
        begin, end = begin + first, begin + last
    return begin, end


def error_bound(plan: Plan, num_ranks: int, magnitude: float, roundoff: float = 2.0**-24) -> float:
    """Return the largest difference of an element of the result from the exact sum.

    Legend: p ranks; m = sum of |contributions|; u the roundoff of the dtype that adds; w and t the roundoff and the
    underflow of the comm dtype.  The bound is

        ((1+u)^p (1+w)^2 - 1) m + (p+1) (1+u)^p (1+w)^2 t

    u counts once per addition (p-1 in any order, and one when fp64 becomes fp32 before 16 bits); w and t count once per
    contribution and once for the result.  This is about 2w m for any p.  The backend's ring rounds each contribution
    and after each of its p-1 additions: about p w m.  t matters only for fp16: contributions below 3e-8 vanish, so fp16
    needs a loss scale.  The bound holds while m is finite in the comm dtype (65,504 for fp16); beyond it every rank
    gets inf or nan.
    """
    rounded = [(COMM_DTYPES[phase.dtype], num_ranks if phase.backend else 2) for phase in plan.phases]
    # Logarithms, since 1 + 2**-53 is 1 in float64.
    growth = num_ranks * math.log1p(roundoff) + sum(count * math.log1p(format.roundoff) for format, count in rounded)
    underflow = (num_ranks + 1) * sum(format.underflow for format, _ in rounded)
    return math.expm1(growth) * magnitude + math.exp(growth) * underflow
