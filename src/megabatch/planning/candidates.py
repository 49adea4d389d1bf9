"""Which plans are asked for, or open to choice, on a cluster of some shape.

`in_memory`: the ranks of a host exchange through its shared memory.
"""

from megabatch.planning.algorithms import ALGORITHMS, ON_REQUEST
from megabatch.planning.plan import CommDtype, Plan
from megabatch.planning.topology import ClusterShape


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
