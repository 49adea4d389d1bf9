"""The cluster that `megabatch plan` has measured, as a cluster file would describe it.

A link's beta says what one rank gets while all ranks of its node are at work: a node's card carries k times as much.
Devices are not measured by a plan: what they compute comes from a profile (`--profile`).
"""

from typing import Any

from megabatch.planning.cost import Link
from megabatch.planning.tuning import Tuning

LEAST_BETA = 1e-12  # s/B: bytes for which no time was found left
ASSUMED_GBPS, ASSUMED_ALPHA_US = 1.0, 100.0
PLAN = "measured by megabatch plan"
NO_NETWORK = "assumed: the plan was measured on one host; give it, as network.gbps=10"


def describe_measured(tuning: Tuning) -> dict[str, Any]:
    """As tables of a cluster file."""
    shape, links = tuning.topology.shape, tuning.links
    k = shape.largest_node
    inside = links.get("node") or links.get("all") or Link(0.0, LEAST_BETA, LEAST_BETA)
    between = (links.get("inter_node") or links.get("leaders") or links.get("all")) if shape.num_nodes > 1 else None
    ranks_at_work = k if "inter_node" in links else 1
    network: dict[str, Any] = {"nics": 1, "efficiency": 1.0, "kind": "tcp"}
    if between:
        bytes_per_s = ranks_at_work / max(LEAST_BETA, between.beta_s_per_byte)
        network |= {"gbps": 8e-9 * bytes_per_s, "alpha_us": 1e6 * between.alpha_s}
    else:
        network |= {"gbps": ASSUMED_GBPS, "alpha_us": ASSUMED_ALPHA_US}
    return {
        "about": f"{shape.num_nodes} hosts of {k} ranks, as measured",
        "device": {
            "name": "as recorded in the profile",
            "stack": "this installation",
            "memory_gb": 1e6,
            "memory_gb_per_s": 1e-9 / max(LEAST_BETA, inside.gamma_s_per_byte),
            "curves": {},
        },
        "node": {
            "ranks": k,
            "gb_per_s": 1e-9 / max(LEAST_BETA, inside.beta_s_per_byte),
            "alpha_us": 1e6 * inside.alpha_s,
        },
        "network": network,
        "engine": {"name": "gloo", "base_us": 0.0, "sums": ["ring"], "in_parts": True},
        "uncertainty": {"device": 0.1, "bandwidth": 1.2, "latency": 1.5, "jitter": 1.0},
        "sources": {
            **dict.fromkeys(["node.ranks", "node.gb_per_s", "node.alpha_us", "device.memory_gb_per_s"], PLAN),
            **dict.fromkeys(["network.gbps", "network.alpha_us"], PLAN if between else NO_NETWORK),
            **dict.fromkeys(["network.nics", "network.efficiency"], "what is measured is what arrives"),
            **dict.fromkeys(["device.memory_gb", "engine.base_us"], "no limit, no cost of its own"),
            "uncertainty.device": "assumed",
            "uncertainty.bandwidth": "assumed",
            "uncertainty.latency": "assumed",
            "uncertainty.jitter": "none is simulated",
        },
    }
