"""A cluster that need not exist: device, node, network, engine, jitter, faults and price, as its TOML file says.

Units are those of data sheets: GB/s and Gb/s (10^9), microseconds, dollars.  `sources` says of every number where it is
from; load.py reads the files.

What a cluster makes of `planning`'s links, with k ranks in a node and all of them at work at once:
    node         what a rank sends and receives at once in the node
    inter_node   the node's cards, shared by its k ranks
    leaders      one card: a rank alone has no other
    all          as in the engine's ring; with 16 bits one half is a direct exchange, for which ranks share the cards
On CPUs the cores come into it, and cores.py has the links.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from megabatch.planning.cost import Link
from megabatch.planning.plan import CommDtype, EngineSum
from megabatch.planning.stock import Engine
from megabatch.planning.topology import Axis, ClusterShape
from megabatch.simulate.cores import CoreCosts, cpu_links
from megabatch.simulate.device import Curve, NotNegative, Positive

Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1, le=100)]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a cluster file."""


class Device(Section, frozen=True, kw_only=True):
    name: str
    stack: str  # the software, without which a device has no speed
    memory_gb: Positive
    memory_gb_per_s: Positive
    curves: dict[str, list[Curve]]  # by precision; one for each model that was measured
    variant: str = ""  # of the points; "": the first


class Node(Section, frozen=True, kw_only=True):
    ranks: Annotated[int, Meta(ge=1, le=1024)]
    gb_per_s: Positive  # bus bandwidth of an all-reduce in the node
    alpha_us: NotNegative  # latency of a hop


class Network(Section, frozen=True, kw_only=True):
    nics: Annotated[int, Meta(ge=1, le=64)]
    gbps: Annotated[float, Meta(ge=1e-3, le=1e6)]  # of each
    efficiency: Annotated[float, Meta(ge=0.01, le=1)]  # of the nominal rate, for all-reduces of tens of megabytes
    alpha_us: NotNegative
    kind: Literal["rdma", "tcp"]
    in_network_reduction: bool = False  # sums in the switches, as SHARP
    switch_alpha_us: NotNegative = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of a node."""
        return self.nics * self.nic_bytes_per_s

    @property
    def nic_bytes_per_s(self) -> float:
        return self.efficiency * self.gbps * 1e9 / 8


class EngineSettings(Section, frozen=True, kw_only=True):
    name: str
    base_us: NotNegative  # of one collective
    coordinate_us: NotNegative = 0.0  # for every rank and collective, where a coordinator asks all (Horovod)
    sums: tuple[EngineSum, ...] = ("ring",)
    in_parts: bool = False  # our plans cut buckets and let their parts follow each other: on CPUs


class Input(Section, frozen=True, kw_only=True):
    images_per_s: NotNegative = 0.0  # that a node reads and decodes while it trains; 0: never waited for


class Cpu(Section, frozen=True, kw_only=True):
    """For ranks on CPUs, which send, receive and add up on the cores that compute (cores.py)."""

    cores: Positive  # of a host, or of the machine that all hosts share
    hosts_on_machine: bool = False
    crowding: Factor = 1.0  # by how much ranks compute longer while others compute on the cores beside them
    costs: CoreCosts


class Jitter(Section, frozen=True, kw_only=True):
    """Small noise of every rank, and rare stalls of a rank, for which all wait."""

    noise: Share = 0.0  # of a rank's step
    stalls_per_step: Share = 0.0  # of a rank
    stall_ms: NotNegative = 0.0  # on average


class Faults(Section, frozen=True, kw_only=True):
    interruptions_per_rank_hour: Share = 0.0
    restart_minutes: NotNegative = 0.0
    checkpoint_s: NotNegative = 0.0  # that a step waits for one


class Price(Section, frozen=True, kw_only=True):
    usd_per_rank_hour: NotNegative = 0.0  # 0: not known


class Uncertainty(Section, frozen=True, kw_only=True):
    """Of what is not measured on the cluster itself; the device's own comes from the spread of its points."""

    device: NotNegative = 0.0  # relative, besides
    bandwidth: Factor = 1.0  # of node and network
    latency: Factor = 1.0
    jitter: Factor = 1.0


class Cluster(Section, frozen=True, kw_only=True):
    name: str = ""
    about: str = ""
    device: Device
    node: Node
    network: Network
    engine: EngineSettings
    input: Input = field(default_factory=Input)
    jitter: Jitter = field(default_factory=Jitter)
    faults: Faults = field(default_factory=Faults)
    price: Price = field(default_factory=Price)
    cpu: Cpu | None = None
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    sources: dict[str, str] = {}  # by key

    def shape(self, num_ranks: int) -> ClusterShape:
        """Full nodes, and the rest in one more."""
        full, rest = divmod(num_ranks, self.node.ranks)
        sizes = {rest: 1, self.node.ranks: full}
        return ClusterShape(tuple((size, count) for size, count in sizes.items() if size and count))

    @property
    def collectives(self) -> Engine:
        """What the engine's own cost."""
        return Engine(
            base_s=self.engine.base_us / 1e6,
            coordinate_s=self.engine.coordinate_us / 1e6,
            hop_in_node_s=self.node.alpha_us / 1e6,
            hop_between_s=self.network.alpha_us / 1e6,
            hop_switch_s=self.network.switch_alpha_us / 1e6,
            node_bytes_per_s=self.node.gb_per_s * 1e9,
            network_bytes_per_s=self.network.bytes_per_s,
        )

    @property
    def engine_sums(self) -> list[EngineSum]:
        has_switches = self.network.in_network_reduction
        return [*self.engine.sums, *(["in_network"] if has_switches else [])]  # type: ignore[list-item]

    def links(self, shape: ClusterShape, dtype: CommDtype) -> dict[Axis, Link]:
        if self.cpu:
            gbps = self.network.nics * self.network.gbps
            return cpu_links(shape, dtype, self.cpu.costs, gbps, self.cpu.cores, self.cpu.hosts_on_machine)
        hop_s, hop_in_node_s = self.network.alpha_us / 1e6, self.node.alpha_us / 1e6
        node_beta, adding = 1e-9 / self.node.gb_per_s, 1e-9 / self.device.memory_gb_per_s
        p, H, k = shape.num_ranks, shape.num_nodes, shape.largest_node
        if H == 1:
            alone = Link(hop_in_node_s, node_beta, adding)
            return {"node": alone, "all": alone, "leaders": alone, "inter_node": alone}
        shared = k / self.network.bytes_per_s
        ring = max(node_beta if k > 1 else 0.0, 1 / self.network.bytes_per_s)
        hops_s = ((p - H) * hop_in_node_s + (H - 1) * hop_s) / (p - 1)
        return {
            "node": Link(hop_in_node_s, node_beta, adding),
            "inter_node": Link(hop_s, shared, adding),
            "leaders": Link(hop_s, 1 / self.network.nic_bytes_per_s, adding),
            "all": Link(hops_s, ring if dtype == "fp32" else (ring + shared) / 2, adding),
        }
