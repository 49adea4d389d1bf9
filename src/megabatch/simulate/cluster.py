"""A real or hypothetical cluster as described by a TOML file: device, node, network, engine, jitter, faults and price.

Units are those of data sheets: GB/s and Gb/s (10^9), microseconds, dollars.  `sources` gives the origin of every
number.  load.py reads the files.

`Cluster.links` gives the links of `planning`, with k ranks per node that all communicate at once:
    node         the bandwidth of one rank inside the node
    inter_node   the network cards of the node, shared by its k ranks
    leaders      one network card, because one rank does not use more
    all          as in the backend's ring; with 16 bits one half is a direct exchange, in which ranks share the cards
On CPUs the links also depend on the cores (cores.py).
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from megabatch.planning.backend_cost import BackendCosts
from megabatch.planning.cost import Link
from megabatch.planning.plan import BackendAlgorithm, CommDtype
from megabatch.planning.topology import Axis, ClusterShape
from megabatch.simulate.cores import CoreCosts, cpu_links
from megabatch.simulate.device import Curve, NotNegative, Positive

Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1, le=100)]


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a cluster file."""


class Device(Section, frozen=True, kw_only=True):
    name: str
    stack: str  # the software, on which the speed of a device depends
    memory_gb: Positive
    memory_gb_per_s: Positive
    curves: dict[str, list[Curve]]  # by precision; one per measured model
    variant: str = ""  # of the points; "": that of the first point


class Node(Section, frozen=True, kw_only=True):
    ranks: Annotated[int, Meta(ge=1, le=1024)]
    gb_per_s: Positive  # bus bandwidth of an all-reduce in the node
    alpha_us: NotNegative  # latency per hop


class Network(Section, frozen=True, kw_only=True):
    nics: Annotated[int, Meta(ge=1, le=64)]
    gbps: Annotated[float, Meta(ge=1e-3, le=1e6)]  # per network card
    efficiency: Annotated[float, Meta(ge=0.01, le=1)]  # share of `gbps` that all-reduces of tens of megabytes reach
    alpha_us: NotNegative
    kind: Literal["rdma", "tcp"]
    in_network_reduction: bool = False  # switches that reduce (SHARP)
    switch_alpha_us: NotNegative = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of a node."""
        return self.nics * self.nic_bytes_per_s

    @property
    def nic_bytes_per_s(self) -> float:
        return self.efficiency * self.gbps * 1e9 / 8


class EngineSettings(Section, frozen=True, kw_only=True):
    name: str
    base_us: NotNegative  # per collective
    coordinate_us: NotNegative = 0.0  # per rank and collective, if a coordinator asks all ranks (Horovod)
    sums: tuple[BackendAlgorithm, ...] = ("ring",)
    in_parts: bool = False  # True on CPUs: our plans cut buckets there into parts that overlap


class Input(Section, frozen=True, kw_only=True):
    images_per_s: NotNegative = 0.0  # read and decoded by a node while it trains; 0: input is never a limit


class Cpu(Section, frozen=True, kw_only=True):
    """The cores of ranks on CPUs, which communicate on the cores that compute (cores.py)."""

    cores: Positive  # per node, or of the machine if all nodes share one
    hosts_on_machine: bool = False
    crowding: Factor = 1.0  # slowdown of a rank while others compute on neighbouring cores
    costs: CoreCosts


class Jitter(Section, frozen=True, kw_only=True):
    """Differences between ranks for which all ranks wait: speed, and rare stalls."""

    noise: Share = 0.0  # relative standard deviation of the speeds of ranks
    stalls_per_step: Share = 0.0  # per rank
    stall_ms: NotNegative = 0.0  # mean length


class Faults(Section, frozen=True, kw_only=True):
    interruptions_per_rank_hour: Share = 0.0
    restart_minutes: NotNegative = 0.0
    checkpoint_s: NotNegative = 0.0  # for which training stops


class Price(Section, frozen=True, kw_only=True):
    usd_per_rank_hour: NotNegative = 0.0  # 0: unknown


class Uncertainty(Section, frozen=True, kw_only=True):
    """The uncertainty of values that were not measured on this cluster, in addition to that of the device's curve."""

    device: NotNegative = 0.0  # relative
    bandwidth: Factor = 1.0  # in the node and between nodes
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
        """Return full nodes, with the remaining ranks in one more."""
        full, rest = divmod(num_ranks, self.node.ranks)
        sizes = {rest: 1, self.node.ranks: full}
        return ClusterShape(tuple((size, count) for size, count in sizes.items() if size and count))

    @property
    def collectives(self) -> BackendCosts:
        return BackendCosts(
            base_s=self.engine.base_us / 1e6,
            coordinate_s=self.engine.coordinate_us / 1e6,
            hop_in_node_s=self.node.alpha_us / 1e6,
            hop_between_s=self.network.alpha_us / 1e6,
            hop_switch_s=self.network.switch_alpha_us / 1e6,
            node_bytes_per_s=self.node.gb_per_s * 1e9,
            network_bytes_per_s=self.network.bytes_per_s,
        )

    @property
    def engine_sums(self) -> list[BackendAlgorithm]:
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
            "all": Link(hops_s, ring if dtype == "same" else (ring + shared) / 2, adding),
        }
