"""An all-reduce as a value: a plan is a list of phases, which executor, cost model, simulator and test oracle read.

A phase runs one operation in every group of its axis (topology.py), on the elements that the group holds:
    all_reduce       every member ends with the sum
    reduce           the first member ends with the sum; what the others hold means nothing until a broadcast
    broadcast        every member ends with what the first one holds
    reduce_scatter   member i ends with slice i of the sum, and holds only that slice from here on
    all_gather       undoes the last reduce_scatter: every member ends with all slices
A plan ends with every rank holding the whole sum, the same bits on all.

`wire` is what travels.  fp32 stands for the tensor's own type: nothing is rounded on the way, and a float64 tensor
stays float64.  With a 16-bit wire every contribution is rounded to it once, the sum is made in fp32 in ascending
rank order, and rounded once; every member keeps the rounded values, the owner of a slice too (and its own
contribution is rounded like the others', so that the sum does not depend on who owns the slice).  Sums of 16-bit
tensors on their own wire are made in fp32 too, and rounded once a phase.
"""

import math
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct

from megabatch.planning.topology import Axis, Topology

Op = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]
Wire = Literal["fp32", "bf16", "fp16"]
Slice = tuple[int, int]  # elements [begin, end)

BLOCK = 16  # elements: a cache line of fp32
PLACES: dict[Axis, str] = {
    "all": "over all ranks",
    "node": "in the node",
    "masters": "among masters",
    "across": "across",
}


class WireFormat(NamedTuple):
    num_bytes: int  # per element
    roundoff: float  # the largest relative error of rounding to it
    underflow: float  # the largest absolute error below its normal numbers: half the smallest subnormal


WIRES: dict[Wire, WireFormat] = {
    "fp32": WireFormat(4, 0.0, 0.0),
    "bf16": WireFormat(2, 2.0**-8, 2.0**-134),
    "fp16": WireFormat(2, 2.0**-11, 2.0**-25),
}


class Phase(Struct, frozen=True):
    op: Op
    axis: Axis
    wire: Wire

    def __str__(self) -> str:
        return f"{self.op} {PLACES[self.axis]}" + ("" if self.wire == "fp32" else f" in {self.wire}")


class Plan(Struct, frozen=True):
    name: str
    phases: tuple[Phase, ...]

    @property
    def network(self) -> slice:
        """The phases from the first that leaves the node to the last; empty, at the end, if none does."""
        places = [index for index, phase in enumerate(self.phases) if phase.axis != "node"]
        return slice(places[0], places[-1] + 1) if places else slice(len(self.phases), len(self.phases))

    @property
    def crosses(self) -> bool:
        return bool(self.phases[self.network])

    def __str__(self) -> str:
        return f"{self.name}: " + (", ".join(map(str, self.phases)) or "nothing to exchange")


class Exchange(NamedTuple):
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
    block = BLOCK if num_elements >= BLOCK * parts else 1
    num_blocks = math.ceil(num_elements / block)
    # Rounding down makes the last slice one of the largest, and the short block at the end falls into it.
    bounds = [min(num_elements, num_blocks * part // parts * block) for part in range(parts + 1)]
    return list(pairwise(bounds))


def exchanges(plan: Plan, topology: Topology, num_elements: int) -> list[list[Exchange]]:
    """For every phase, what each group of its axis exchanges."""
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
            exchange = Exchange(members, *ranges.pop())
            if phase.op == "reduce_scatter":
                for rank, part in zip(members, exchange.slices, strict=True):
                    held[rank].append(part)
            at_work.append(exchange)
        result.append(at_work)
    return result


def error_bound(plan: Plan, num_ranks: int, magnitude: float, roundoff: float = 2.0**-24) -> float:
    """The most by which an element of the result differs from the exact sum.  p ranks, m = sum of |contributions|.

    ((1+u)^p (1+w)^2 - 1) m + (p+1) (1+u)^p (1+w)^2 t: u is the roundoff of the type that sums, once per addition
    (p-1 in any order, and one where a float64 becomes fp32 on its way to 16 bits); w and t are roundoff and underflow
    of the wire, once per contribution and once for the result.  About 2w m, whatever p is, while a 16-bit ring that
    rounds at every hop has about p w m.  t matters for fp16 alone: contributions below 3e-8 vanish, so fp16 wants a
    loss scale.  The bound holds while m is finite on the wire (65,504 for fp16); beyond it every rank gets inf or nan.
    """
    rounded = [WIRES[phase.wire] for phase in plan.phases]
    # Logarithms, since 1 + 2**-53 is 1 in float64.
    growth = num_ranks * math.log1p(roundoff) + sum(2 * math.log1p(wire.roundoff) for wire in rounded)
    underflow = (num_ranks + 1) * sum(wire.underflow for wire in rounded)
    return math.expm1(growth) * magnitude + math.exp(growth) * underflow
