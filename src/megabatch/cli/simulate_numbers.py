"""Numbers of a simulation as they are printed."""

from megabatch.simulate.cluster import Cluster
from megabatch.simulate.scenario import Simulated


def ranks_of(result: Simulated) -> str:
    return f"{result.scenario.num_ranks:,} rank{'s' * (result.scenario.num_ranks > 1)}"


def nodes(result: Simulated) -> str:
    shape = result.scenario.cluster.shape(result.scenario.num_ranks)
    count = shape.num_nodes
    return f"{ranks_of(result)} ({count:,} node{'s' * (count > 1)} of {shape.largest_node})"


def describe_links(cluster: Cluster) -> str:
    """As 'nodes of 8 at 183 GB/s, 8 cards of 200 Gb/s (rdma), sums in switches'."""
    node, network = cluster.node, cluster.network
    inside = f"nodes of {node.ranks} at {figures(node.gb_per_s)} GB/s" if node.ranks > 1 else "nodes of one rank"
    if cluster.cpu:  # which then decide
        shared = " that they share" if cluster.cpu.hosts_on_machine else ""
        inside = f"nodes of {node.ranks} on {cluster.cpu.cores:g} cores{shared}"
    cards = f"{network.nics} card{'s' * (network.nics > 1)} of {figures(network.gbps)} Gb/s ({network.kind})"
    return f"{inside}, {cards}, {'sums in switches' if network.in_network_reduction else 'no sums in switches'}"


def algorithms(result: Simulated) -> str:
    return "+".join(dict.fromkeys(bucket.plan.name.partition("/")[0] for bucket in result.step.buckets)) or "-"


def interval(result: Simulated) -> str:
    """Of images/s, as -6 +5 %."""
    low, high = (100 * (rate / result.images_per_s - 1) for rate in (result.low_images_per_s, result.high_images_per_s))
    return f"{low:.0f} {high:+.0f} %"


def milliseconds(seconds: float) -> str:
    return figures(1e3 * seconds)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def figures(value: float | None) -> str:
    """About three of them: 0.042, 0.421, 7.31, 48.2, 1,204."""
    if value is None:
        return "-"
    digits = next((digits for digits, bound in enumerate((100, 10, 1, 0.1)) if abs(value) >= bound), 3)
    return f"{value:,.{digits}f}" if value else "0"


def duration(minutes: float) -> str:
    """In the unit that one would say."""
    if minutes < 2:
        return f"{figures(60 * minutes)} s"
    return f"{figures(minutes)} minutes" if minutes < 120 else f"{figures(minutes / 60)} hours"
