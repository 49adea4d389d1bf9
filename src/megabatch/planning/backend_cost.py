"""The cost of the backend's own all-reduce: NCCL's ring and tree, and reduction in the switches of the network.

It is priced so that published runs can be simulated.  A run uses it if the user asks for it (`comm.algorithm=ring`) and
for `flat` when nothing is rounded; the backend then chooses between the three.

Legend: p ranks, H nodes of k ranks, S bytes in the comm dtype.  Seconds:
    ring         base + 2(p-H) a + 2(H-1) A + 2(p-1)/p S/B        B = min(in the node, between nodes): one pipeline
    tree         base + 2(k-1) a + 2 log2(H) A + 2 S/B            every rank passes all bytes up and down
    in_network   base + 2(k-1) a + A' + max(2(k-1)/k S/node, S/network)
a is the latency of a hop in the node, A between nodes, A' through the switches and back.

Source: latencies follow NCCL's tuning model (src/graph/tuning.cc), simplified: NCCL has other hops for trees, and
corrects trees by size.  Bytes are those that the algorithms move.  in_network (SHARP) is a reduce-scatter and an
all-gather in the node, between which each slice crosses the network once up and once down, at the same time.

Every hop adds in the comm dtype, so 16-bit values are rounded up to p-1 times (plan.error_bound); our plans round
twice.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from megabatch.planning.algorithms import plan_name
from megabatch.planning.cost import comm_bytes_of
from megabatch.planning.pipeline import Costs
from megabatch.planning.plan import BackendAlgorithm, CommDtype, Phase, Plan
from megabatch.planning.topology import ClusterShape


class BackendCosts(Struct, frozen=True, kw_only=True):
    """Latencies and bandwidths of a communication library and its links."""

    base_s: float  # per collective
    coordinate_s: float = 0.0  # per rank and collective, if a coordinator asks all ranks first (Horovod)
    hop_in_node_s: float
    hop_between_s: float
    hop_switch_s: float = 0.0
    node_bytes_per_s: float  # bus bandwidth in a node: each rank sends and receives this at once
    network_bytes_per_s: float  # of a node, over all its network cards


def backend_plans(shape: ClusterShape, dtype: CommDtype, algorithms: Iterable[BackendAlgorithm]) -> list[Plan]:
    """Return one plan per algorithm that applies: trees and switches need several nodes."""
    if shape.num_ranks == 1:
        return []
    applying = [name for name in algorithms if name == "ring" or shape.num_nodes > 1]
    return [Plan(plan_name(name, dtype), (Phase("all_reduce", "all", dtype, name),)) for name in applying]


def price_backend(
    plan: Plan, shape: ClusterShape, backend: BackendCosts, num_elements: int, element_bytes: int
) -> Costs:
    """Return the costs of one bucket.  Node and network work at once, so no other bucket overlaps with it."""
    (phase,) = plan.phases
    assert phase.backend, plan
    seconds = backend_seconds(phase.backend, shape, backend, num_elements * comm_bytes_of(phase, element_bytes))
    return Costs(seconds, 0.0, 0.0, crosses=False) if shape.num_nodes == 1 else Costs(0.0, seconds, 0.0, crosses=True)


def backend_seconds(algorithm: BackendAlgorithm, shape: ClusterShape, backend: BackendCosts, num_bytes: int) -> float:
    p, H, k = shape.num_ranks, shape.num_nodes, shape.largest_node
    node, network = backend.node_bytes_per_s, backend.network_bytes_per_s
    slowest = node if H == 1 else network if k == 1 else min(node, network)
    base_s = backend.base_s + p * backend.coordinate_s
    match algorithm:
        case "ring":
            hops_s = 2 * (p - H) * backend.hop_in_node_s + 2 * (H - 1) * backend.hop_between_s
            return base_s + hops_s + 2 * (p - 1) / p * num_bytes / slowest
        case "tree":
            hops_s = 2 * (k - 1) * backend.hop_in_node_s + 2 * math.log2(H) * backend.hop_between_s
            return base_s + hops_s + 2 * num_bytes / slowest
        case "in_network":
            hops_s = 2 * (k - 1) * backend.hop_in_node_s + backend.hop_switch_s
            return base_s + hops_s + max(2 * (k - 1) / k * num_bytes / node, num_bytes / network)
