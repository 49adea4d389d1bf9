"""All-reduce algorithms: functions from a cluster's shape and a dtype to a plan, or None where they do not apply.

Legend: p ranks, H nodes of k ranks, S bytes per rank (S/2 of them travel in a 16-bit phase when the tensor is fp32).
Steps are messages that wait for each other; costs are those of cost.py.

Phases inside a node are fp32: the network is the bottleneck, not memory.  Phases in which every group has one member
are left out: hierarchical and torus on one node cross nothing and round nothing, and one rank has nothing to do.
"""

from collections.abc import Callable, Iterable

from megabatch.planning.plan import CommDtype, Phase, Plan
from megabatch.planning.topology import ClusterShape

Algorithm = Callable[[ClusterShape, CommDtype], Plan | None]


def flat(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """Flat all-reduce.  p ranks, S bytes.
    The backend's own all-reduce over all ranks, whatever links lie between them; its dtype applies in a node too.
    Steps 2(p-1); bytes sent per rank 2S(p-1)/p, the least possible.   Ring: Patarasuk and Yuan 2009.
    """
    return Plan(f"flat/{dtype}", exchanging(shape, [Phase("all_reduce", "all", dtype)]))


def hierarchical(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """Hierarchical all-reduce.  H nodes of k ranks, p = Hk, S bytes.
    Reduce inside the node to its leader, all-reduce among these leaders, broadcast inside.   Jia et al. 2018.
    Steps 4(k-1) + 2(p/k-1); inter-node bytes per node 2S(H-1)/H, all of them through one rank.  Few steps, so for
    small tensors.  Unequal nodes are welcome.
    """
    phases = [
        Phase("reduce", "node", "fp32"),
        Phase("all_reduce", "leaders", dtype),
        Phase("broadcast", "node", "fp32"),
    ]
    return Plan(f"hierarchical/{dtype}", exchanging(shape, phases))


def torus(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """2D-torus all-reduce.  H nodes of k ranks, p = Hk, S bytes.
    Reduce-scatter inside the node, inter-node all-reduce of each rank's slice, all-gather inside.   Mikami et al. 2018.
    Steps 2(k-1) + 2(H-1); inter-node bytes per node 2S(H-1)/H, 1/k of them from each rank, so none is a hot spot.
    None for unequal nodes: their slices do not match.
    """
    if not shape.is_regular:
        return None
    phases = [
        Phase("reduce_scatter", "node", "fp32"),
        Phase("all_reduce", "inter_node", dtype),
        Phase("all_gather", "node", "fp32"),
    ]
    return Plan(f"torus/{dtype}", exchanging(shape, phases))


def ring(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """The backend's own all-reduce over all ranks, whatever its dtype: flat, but for 16 bits.  p ranks, S bytes.
    Gloo's is a ring; NCCL takes what suits it (its ring, its trees: NCCL_ALGO).  16 bits are rounded at every hop, so
    the error grows with p (plan.error_bound); a user can prefer that to what flat takes instead, an exchange with all
    others.  Steps 2(p-1); bytes sent per rank 2S(p-1)/p.
    """
    return Plan(f"ring/{dtype}", exchanging(shape, [Phase("all_reduce", "all", dtype, "ring")]))


ALGORITHMS: dict[str, Algorithm] = {"flat": flat, "hierarchical": hierarchical, "torus": torus}  # `auto` chooses
ON_REQUEST: dict[str, Algorithm] = {"ring": ring}  # what rounds more is the user's choice alone


def exchanging(shape: ClusterShape, phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """The phases in which some rank has another one to exchange with; the two halves of an all-reduce are one."""
    kept = tuple(phase for phase in phases if shape.largest_group(phase.axis) > 1)
    if [phase.op for phase in kept] == ["reduce_scatter", "all_gather"]:
        return (Phase("all_reduce", kept[0].axis, kept[0].dtype),)
    return kept


# Which plans are asked for, or open to choice, on a cluster of some shape.
#
# `in_memory`: the ranks of a host exchange through its shared memory.


def default_plan(algorithm: str, dtype: CommDtype, shape: ClusterShape, in_memory: bool) -> Plan | None:
    """The plan of this algorithm, or None where it does not apply.

    `auto` always does: torus where ranks of a host exchange through its memory, or hierarchical if hosts have unequal
    numbers of ranks; elsewhere, as on GPUs, the backend's own all-reduce.
    """
    if algorithm == "auto":
        algorithm = "flat" if not in_memory else "torus" if shape.is_regular else "hierarchical"
    return (ALGORITHMS | ON_REQUEST)[algorithm](shape, dtype)


def candidate_plans(
    algorithm: str, dtype: CommDtype, shape: ClusterShape, in_memory: bool, on_accelerators: bool
) -> list[Plan]:
    """What `auto` may choose from: one, where the memory of a host or the lack of it decides.  None where the algorithm
    that was asked for does not apply."""
    has_choice = algorithm == "auto" and shape.num_nodes > 1 and (in_memory or on_accelerators)
    if has_choice:
        # With one rank per node, leaders are all ranks, and torus is the same exchange.
        names = [name for name in ALGORITHMS if name != "hierarchical" or shape.largest_node > 1]
        plans = [ALGORITHMS[name](shape, dtype) for name in names]
    else:
        plans = [default_plan(algorithm, dtype, shape, in_memory)]
    return [plan for plan in plans if plan is not None]
