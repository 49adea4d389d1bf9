"""The engine's own all-reduce: NCCL's ring, its tree, and sums made in the switches of the network.  Priced, so that
published runs can be simulated.  The runtime takes it where a user asks for it (`comm.algorithm=ring`), and for `flat`
where nothing is rounded; which of the three it is then, is the engine's choice.

Legend: p ranks, H nodes of k ranks, S bytes as they travel.  Seconds:
    ring         base + 2(p-H) a + 2(H-1) A + 2(p-1)/p S/B        B = min(in the node, between nodes): one pipeline
    tree         base + 2(k-1) a + 2 log2(H) A + 2 S/B            every rank passes all bytes up and down
    in_network   base + 2(k-1) a + A' + max(2(k-1)/k S/node, S/network)
a is the latency of a hop in the node, A between nodes, A' through the switches and back.  The latencies are those of
NCCL's own tuning model (src/graph/tuning.cc), simplified: it has other hops for trees, and corrects trees by size.
Bytes are counted as the algorithms move them; the last one is a reduce-scatter and an all-gather in the node, between
which each slice crosses the network once up and once down, at the same time (SHARP).

Every hop adds in the dtype that travels, so 16 bits are rounded up to p-1 times on their way (plan.error_bound); our
own plans round twice.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from megabatch.planning.cost import travelling_bytes
from megabatch.planning.pipeline import Costs
from megabatch.planning.plan import CommDtype, EngineSum, Phase, Plan
from megabatch.planning.topology import ClusterShape


class Engine(Struct, frozen=True, kw_only=True):
    """What a communication library and its links cost."""

    base_s: float  # of one collective, whatever it does
    coordinate_s: float = 0.0  # for every rank, where a coordinator asks all before each collective (Horovod)
    hop_in_node_s: float
    hop_between_s: float
    hop_switch_s: float = 0.0
    node_bytes_per_s: float  # bus bandwidth in a node: what each rank sends and receives at once
    network_bytes_per_s: float  # of a node, over all its cards


def engine_plans(shape: ClusterShape, dtype: CommDtype, sums: Iterable[EngineSum]) -> list[Plan]:
    """Those that apply: a tree, or a switch, needs several nodes; one rank needs nothing."""
    if shape.num_ranks == 1:
        return []
    applying = [kind for kind in sums if kind == "ring" or shape.num_nodes > 1]
    return [Plan(f"{kind}/{dtype}", (Phase("all_reduce", "all", dtype, kind),)) for kind in applying]


def price_engine(plan: Plan, shape: ClusterShape, engine: Engine, num_elements: int, element_bytes: int) -> Costs:
    """Of a bucket alone; node and network work at once, so nothing of another bucket runs beside it."""
    (phase,) = plan.phases
    assert phase.engine, plan
    seconds = engine_seconds(phase.engine, shape, engine, num_elements * travelling_bytes(phase, element_bytes))
    return Costs(seconds, 0.0, 0.0, crosses=False) if shape.num_nodes == 1 else Costs(0.0, seconds, 0.0, crosses=True)


def engine_seconds(kind: EngineSum, shape: ClusterShape, engine: Engine, num_bytes: int) -> float:
    p, H, k = shape.num_ranks, shape.num_nodes, shape.largest_node
    node, network = engine.node_bytes_per_s, engine.network_bytes_per_s
    slowest = node if H == 1 else network if k == 1 else min(node, network)
    base_s = engine.base_s + p * engine.coordinate_s
    match kind:
        case "ring":
            hops_s = 2 * (p - H) * engine.hop_in_node_s + 2 * (H - 1) * engine.hop_between_s
            return base_s + hops_s + 2 * (p - 1) / p * num_bytes / slowest
        case "tree":
            hops_s = 2 * (k - 1) * engine.hop_in_node_s + 2 * math.log2(H) * engine.hop_between_s
            return base_s + hops_s + 2 * num_bytes / slowest
        case "in_network":
            hops_s = 2 * (k - 1) * engine.hop_in_node_s + engine.hop_switch_s
            return base_s + hops_s + max(2 * (k - 1) / k * num_bytes / node, num_bytes / network)
