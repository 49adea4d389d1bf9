"""How gradients are summed: the [comm] section of a recipe, and the arguments of `attach`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from megabatch.errors import UserError, require_one_of
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.plan import WIRES, Plan, Wire
from megabatch.planning.topology import Topology


class CommSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    algorithm: str = "auto"  # auto, or one of planning.algorithms
    wire: Wire = "fp32"  # what travels between hosts
    fusion_mb: Annotated[float, Meta(gt=0)] | Literal["auto"] = "auto"  # gradients are fused up to this
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0  # a rank that does not come for so long is named
    timeline: bool = False  # every rank writes what it did when

    def __post_init__(self) -> None:
        require_one_of("comm.algorithm", self.algorithm, ["auto", *ALGORITHMS])
        require_one_of("comm.wire", self.wire, WIRES)

    def exactly(self) -> "CommSettings":
        """The same with nothing rounded on the wire."""
        return msgspec.structs.replace(self, wire="fp32")


def choose_plan(settings: CommSettings, topology: Topology, in_memory: bool) -> Plan:
    """`auto`: torus where ranks of a host sum through its memory, or hierarchical if hosts have unequal numbers of
    ranks; elsewhere, as on GPUs, the engine's own all-reduce."""
    name = settings.algorithm
    if name == "auto":
        name = "flat" if not in_memory else "torus" if topology.is_regular else "hierarchical"
    plan = ALGORITHMS[name](topology, settings.wire)
    if plan is None:
        sizes = sorted({len(node) for node in topology.nodes})
        raise UserError(
            f"comm.algorithm={name!r} needs hosts with equally many ranks, not {' and '.join(map(str, sizes))}; "
            "nearest: comm.algorithm=hierarchical"
        )
    return plan


def candidate_plans(settings: CommSettings, topology: Topology, in_memory: bool, is_cuda: bool) -> list[Plan]:
    """What `auto` may choose from: one, where the memory of a host or the lack of it decides."""
    has_choice = settings.algorithm == "auto" and topology.num_nodes > 1 and (in_memory or is_cuda)
    if not has_choice:
        return [choose_plan(settings, topology, in_memory)]
    # With one rank per node, masters are all ranks, and torus is the same exchange.
    names = [name for name in ALGORITHMS if name != "hierarchical" or topology.largest_node > 1]
    plans = [ALGORITHMS[name](topology, settings.wire) for name in names]
    return [plan for plan in plans if plan is not None]
