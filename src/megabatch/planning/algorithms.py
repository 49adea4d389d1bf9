"""All-reduce algorithms: functions from a cluster's shape and a comm dtype to a plan, or None if they do not apply.

Legend: p ranks, H nodes of k ranks, S bytes per rank (an fp32 tensor sends S/2 of them in a 16-bit phase).  Steps are
messages that wait for each other; cost.py has the seconds.

Phases inside a node are fp32: the network is the bottleneck, not memory.  Phases in which every group has one member
are left out.  So hierarchical and torus on one node use no network and round nothing, and one rank has no phases.
"""

from collections.abc import Callable, Iterable

from megabatch.planning.plan import CommDtype, Phase, Plan
from megabatch.planning.topology import ClusterShape

Algorithm = Callable[[ClusterShape, CommDtype], Plan | None]


def flat(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """Flat all-reduce.  p ranks, S bytes.

    One all-reduce by the backend over all ranks, regardless of the links between them.  The comm dtype also applies
    inside a node.  Steps 2(p-1); bytes sent per rank 2S(p-1)/p, the least possible.  Ring: Patarasuk and Yuan 2009.
    """
    return Plan(plan_name("flat", dtype), nontrivial(shape, [Phase("all_reduce", "all", dtype)]))


def hierarchical(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """Hierarchical all-reduce.  H nodes of k ranks, p = Hk, S bytes.

    Reduce to the leader of each node, all-reduce among leaders, broadcast in the node.  Jia et al. 2018.
    Steps 4(k-1) + 2(p/k-1); inter-node bytes per node 2S(H-1)/H, all of them through one rank.  It has few steps, so
    it suits small tensors.  Nodes may have different numbers of ranks.
    """
    phases = [
        Phase("reduce", "node", "same"),
        Phase("all_reduce", "leaders", dtype),
        Phase("broadcast", "node", "same"),
    ]
    return Plan(plan_name("hierarchical", dtype), nontrivial(shape, phases))


def torus(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """2D-torus all-reduce.  H nodes of k ranks, p = Hk, S bytes.

    Reduce-scatter in the node, inter-node all-reduce of each rank's slice, all-gather in the node.  Mikami et al. 2018.
    Steps 2(k-1) + 2(H-1); inter-node bytes per node 2S(H-1)/H, 1/k of them from each rank, so none is a hot spot.
    None if nodes have different numbers of ranks: their slices do not match.
    """
    if not shape.is_regular:
        return None
    phases = [
        Phase("reduce_scatter", "node", "same"),
        Phase("all_reduce", "inter_node", dtype),
        Phase("all_gather", "node", "same"),
    ]
    return Plan(plan_name("torus", dtype), nontrivial(shape, phases))


def shared_memory(shape: ClusterShape) -> Plan:
    """All-reduce of one node through its shared memory.  k ranks, S bytes.

    Each rank adds up its slice of all tensors and copies the other slices.  The comm dtype does not apply.
    """
    assert shape.num_nodes == 1, shape
    return Plan("shared_memory", nontrivial(shape, [Phase("all_reduce", "node", "same")]))


def ring(shape: ClusterShape, dtype: CommDtype) -> Plan | None:
    """The backend's all-reduce over all ranks in any dtype.  p ranks, S bytes.

    Gloo uses a ring; NCCL chooses between its ring and its trees (NCCL_ALGO).  Unrounded, it equals flat.  16-bit
    values are rounded at every hop, so the error grows with p (plan.error_bound), while flat sends them directly from
    each rank to all others and rounds twice.  Steps 2(p-1); bytes sent per rank 2S(p-1)/p.
    """
    return Plan(plan_name("ring", dtype), nontrivial(shape, [Phase("all_reduce", "all", dtype, "ring")]))


ALGORITHMS: dict[str, Algorithm] = {"flat": flat, "hierarchical": hierarchical, "torus": torus}  # `auto` chooses
ON_REQUEST: dict[str, Algorithm] = {"ring": ring}  # rounds more, so `auto` never chooses it


def plan_name(algorithm: str, dtype: CommDtype) -> str:
    return algorithm if dtype == "same" else f"{algorithm}/{dtype}"


def nontrivial(shape: ClusterShape, phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Drop the phases whose groups have one member, and join a reduce-scatter and all-gather left side by side."""
    remaining = tuple(phase for phase in phases if shape.largest_group(phase.axis) > 1)
    if [phase.op for phase in remaining] == ["reduce_scatter", "all_gather"]:
        return (Phase("all_reduce", remaining[0].axis, remaining[0].dtype),)
    return remaining


def default_plan(
    algorithm: str, dtype: CommDtype, shape: ClusterShape, in_memory: bool, in_16_bits: bool = False
) -> Plan | None:
    """Return the plan of an algorithm, or None if it does not apply.  `auto` always applies.

    Without measurements, `auto` depends on whether the ranks of a node exchange through shared memory (`in_memory`) and
    on whether 16 bits are sent (`in_16_bits`; always if `dtype` is not "same").  On one node it is shared_memory or
    flat.  On several it is the backend's all-reduce (flat) for fp32 without shared memory, as on GPUs.  Otherwise it is
    torus, or hierarchical if nodes have different numbers of ranks: flat in 16 bits sends more bytes than a ring does
    in fp32, because each rank of a node sends its values to all other nodes.
    """
    if algorithm == "auto" and shape.num_nodes == 1:
        return shared_memory(shape) if in_memory else flat(shape, dtype)
    if algorithm == "auto":
        in_two_stages = in_memory or in_16_bits or dtype != "same"
        algorithm = "flat" if not in_two_stages else "torus" if shape.is_regular else "hierarchical"
    return (ALGORITHMS | ON_REQUEST)[algorithm](shape, dtype)


def candidate_plans(
    algorithm: str,
    dtype: CommDtype,
    shape: ClusterShape,
    in_memory: bool,
    on_accelerators: bool,
    in_16_bits: bool = False,
) -> list[Plan]:
    """Return the plans that `auto` may choose from, or the plan of the given algorithm.

    The list is empty if the given algorithm does not apply.  `auto` has a choice only between nodes, and only with
    shared memory or on accelerators.  There, flat in 16 bits is not even measured: an exchange of each rank with all
    others takes minutes and gigabytes to connect 2,048 GPUs.
    """
    has_choice = algorithm == "auto" and shape.num_nodes > 1 and (in_memory or on_accelerators)
    if has_choice:
        # With one rank per node, leaders are all ranks, and torus is the same exchange.
        names = [name for name in ALGORITHMS if name != "hierarchical" or shape.largest_node > 1]
        if on_accelerators and (in_16_bits or dtype != "same"):
            names.remove("flat")
        plans = [ALGORITHMS[name](shape, dtype) for name in names]
    else:
        plans = [default_plan(algorithm, dtype, shape, in_memory, in_16_bits)]
    return [plan for plan in plans if plan is not None]
