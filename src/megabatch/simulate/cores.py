"""Links between nodes whose ranks run on CPUs: the network card, and the cores that send bytes and add them.

A rank on a CPU sends, receives, rounds and adds itself, so ranks that share cores take turns.

Legend: per byte that a member of a group sends, w is the time of the network card of the busiest node (for everything
that leaves it), and c is the time of the cores (for everything that the ranks on them do).

Idea: sending overlaps with adding, except for the first and the last message of a sequence:
    beta = max(w, c) + unhidden min(w, c)
The work of cores (`CoreCosts`, seconds of one core per byte) is
    ring         the backend's fp32 all-reduce over all ranks, or between two members
    exchange     the three stages of comm/cpu/process_group.py among more than two members
    exchange_16  the same with 16 bits, including rounding
    memory       adding or copying in the shared memory of a node
Adding is included, so gamma is 0.  Links between nodes also contain the work of the plan inside each node, because
parts of a bucket are in both at once.

Nodes of a cluster have separate cores; nodes that are namespaces of one machine (`hosts_on_machine`) share its cores.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from megabatch.planning.cost import OPS, Link, bytes_crossing, elements_of_busiest
from megabatch.planning.pipeline import PART_BYTES
from megabatch.planning.plan import BLOCK, COMM_DTYPES, CommDtype, Phase, Plan
from megabatch.planning.topology import Axis, ClusterShape, Topology

FP32_BYTES = COMM_DTYPES["same"].num_bytes


class CoreCosts(Struct, frozen=True, kw_only=True):
    """The costs of one core.  A byte between ranks is sent and received."""

    ring_s_per_byte: float
    exchange_s_per_byte: float
    exchange_16_s_per_byte: float
    memory_s_per_byte: float
    step_s: float  # latency of a message between ranks that have a core each
    memory_step_s: float  # latency of a barrier in shared memory
    wire_share: float  # share of the nominal rate that TCP carries; the rest is headers
    exchange_gaps: float  # idle time of the network while the stages of an exchange wait; see exchange_idle
    unhidden: float  # part of the shorter of network and core time that does not overlap, for a sequence of messages
    leaders_unhidden: float  # the same if all messages of a node pass through one rank
    exchange_unhidden: float  # the same if the stages of an exchange wait for each other
    step_unhidden: float = 0.0  # the same for a whole training step


class Cores(NamedTuple):
    """The nodes whose ranks share some cores."""

    nodes: Mapping[int, int]  # ranks per node -> number of such nodes on these cores
    num_cores: float

    @property
    def num_nodes(self) -> int:
        return sum(self.nodes.values())

    @property
    def num_ranks(self) -> int:
        return sum(size * count for size, count in self.nodes.items())

    @property
    def tensors_touched(self) -> int:
        """How often a whole tensor is added or copied in shared memory: k-1 times in a node of k ranks."""
        return sum((size - 1) * count for size, count in self.nodes.items())

    def members(self, axis: Axis) -> int:
        """Return the number of members of all groups along the axis."""
        return self.num_nodes if axis == "leaders" else self.num_ranks

    @property
    def turns(self) -> float:
        """The slowdown of a rank because ranks that share a core take turns."""
        return max(1.0, self.num_ranks / self.num_cores)

    def seconds(self, core_s: float, num_at_once: int) -> float:
        """Return the time of work that `num_at_once` ranks share evenly; a rank uses at most one core."""
        return core_s / min(self.num_cores, num_at_once)


def cores_of(shape: ClusterShape, num_cores: float, hosts_on_machine: bool) -> Cores:
    """Return the cores of the machine that all nodes share, or of the busiest node."""
    return Cores(dict(shape.node_sizes) if hosts_on_machine else {shape.largest_node: 1}, num_cores)


def cpu_links(
    shape: ClusterShape,
    dtype: CommDtype,
    costs: CoreCosts,
    gbps: float,
    num_cores: float,  # of the machine, or of each node; a fraction if work does not spread evenly
    hosts_on_machine: bool,
) -> dict[Axis, Link]:
    """Return the link along every axis of this cluster, for a comm dtype between nodes."""
    cores = cores_of(shape, num_cores, hosts_on_machine)
    links: dict[Axis, Link] = {}
    if shape.largest_node > 1:
        links["node"] = memory_link(shape, costs, cores)
    axes: tuple[Axis, ...] = ("all", "leaders", "inter_node") if shape.is_regular else ("all", "leaders")
    for axis in axes if shape.num_nodes > 1 else ():
        links[axis] = network_link(axis, shape, dtype, costs, gbps, cores)
    return links


def memory_link(shape: ClusterShape, costs: CoreCosts, cores: Cores) -> Link:
    """Return the link of shared memory.  The ranks of a node, and the nodes that share cores, work at once."""
    k = shape.largest_node
    # Per byte of the busiest rank, which adds or copies (k-1)/k of a tensor.
    core_s_per_byte = cores.tensors_touched * k / (k - 1) * costs.memory_s_per_byte
    return Link(
        costs.memory_step_s * max(1.0, cores.num_ranks / cores.num_cores),
        cores.seconds(core_s_per_byte, cores.num_ranks),
        0.0,
        in_memory=True,
    )


def network_link(
    axis: Axis, shape: ClusterShape, dtype: CommDtype, costs: CoreCosts, gbps: float, cores: Cores
) -> Link:
    num_members = cores.members(axis)
    staged = in_stages(axis, shape, dtype)
    wire_s = wire_bytes(axis, shape, dtype) * 8 / (gbps * 1e9 * costs.wire_share)
    if staged:
        wire_s *= 1 + exchange_idle(axis, shape, costs)
    core_s = num_members * core_s_per_byte(axis, shape, dtype, costs)
    cores_s = cores.seconds(core_s, num_members)
    if axis != "all":  # other parts of the bucket are added in the nodes at the same time
        cores_s += cores.seconds(memory_core_s_per_byte(axis, shape, dtype, costs, cores), cores.num_ranks)
    unhidden = max(
        costs.exchange_unhidden if staged else costs.unhidden,
        costs.leaders_unhidden if axis == "leaders" and shape.largest_node > 1 else 0.0,
    )
    byte_s = max(wire_s, cores_s) + unhidden * min(wire_s, cores_s)
    # The steps of a whole part overlap with the bytes of others, so it takes the time of its bytes.  A smaller message
    # takes the time of its steps.
    num_steps = 2 * (shape.largest_group(axis) - 1)
    part_bytes = bytes_of_member(axis, shape, dtype) * PART_BYTES / FP32_BYTES
    step_s = min(costs.step_s * max(1.0, num_members / cores.num_cores), byte_s * part_bytes / num_steps)
    return Link(step_s, byte_s - num_steps * step_s / part_bytes, 0.0)


def core_s_per_byte(axis: Axis, shape: ClusterShape, dtype: CommDtype, costs: CoreCosts) -> float:
    if COMM_DTYPES[dtype].num_bytes < FP32_BYTES:
        return costs.exchange_16_s_per_byte
    return costs.exchange_s_per_byte if in_stages(axis, shape, dtype) else costs.ring_s_per_byte


def in_stages(axis: Axis, shape: ClusterShape, dtype: CommDtype) -> bool:
    """Return True if comm/cpu/process_group.py exchanges in stages.

    Two members send each other everything, and fp32 over all ranks uses the backend.
    """
    is_backends = axis == "all" and dtype == "same"
    return shape.largest_group(axis) > 2 and not is_backends


def exchange_idle(axis: Axis, shape: ClusterShape, costs: CoreCosts) -> float:
    """Return the idle time of the network in an exchange, per second of sending.

    Stages wait for their slowest message.  Plain TCP with the same exchange, without ranks (bench/exchange_stream.py),
    idles for 0.14, 0.25, 0.33, 0.38 and 0.41 on 2, 3, 4, 6 and 8 nodes, with little difference between 0.5 and
    2.5 Gb/s: about 0.55 (1 - 1/H)^2.  Other ranks of the node fill the gaps of one rank.
    """
    num_at_once = 1 if axis == "leaders" else shape.largest_node
    return costs.exchange_gaps * gaps_of_nodes(shape.num_nodes) / num_at_once


def gaps_of_nodes(num_nodes: int) -> float:
    """Return the gaps of this many nodes relative to those of very many."""
    return (1 - 1 / num_nodes) ** 2


def wire_bytes(axis: Axis, shape: ClusterShape, dtype: CommDtype) -> float:
    """Return the bytes that leave the busiest node per byte that the busiest member sends in an all-reduce."""
    phase = Phase("all_reduce", axis, dtype)
    num_elements = BLOCK * shape.num_ranks * shape.num_nodes  # slices are equal along every axis
    width = COMM_DTYPES[dtype].num_bytes
    leaving = max(bytes_crossing(Plan("", (phase,)), consecutive(shape), num_elements, FP32_BYTES))
    sent = sum(elements_of_busiest(half, num_elements, shape.largest_group(axis)) for half in OPS["all_reduce"])
    return leaving / (sent * width)


def consecutive(shape: ClusterShape) -> Topology:
    """Return a topology of this shape with consecutive ranks per node."""
    nodes: list[tuple[int, ...]] = []
    for size, count in shape.node_sizes:
        for _ in range(count):
            begin = nodes[-1][-1] + 1 if nodes else 0
            nodes.append(tuple(range(begin, begin + size)))
    return Topology(tuple(nodes))


def memory_core_s_per_byte(axis: Axis, shape: ClusterShape, dtype: CommDtype, costs: CoreCosts, cores: Cores) -> float:
    """Return the time of adding and copying inside nodes per byte that a member sends between them."""
    touched_bytes = 2 * cores.tensors_touched * FP32_BYTES  # per element
    return touched_bytes * costs.memory_s_per_byte / bytes_of_member(axis, shape, dtype)


def bytes_of_member(axis: Axis, shape: ClusterShape, dtype: CommDtype) -> float:
    """Return the bytes that a member sends per element of a tensor, in an all-reduce of its group."""
    held = 1 / shape.largest_node if axis == "inter_node" else 1.0
    num_members = shape.largest_group(axis)
    return 2 * held * (num_members - 1) / num_members * COMM_DTYPES[dtype].num_bytes


def core_seconds(plan: Plan, shape: ClusterShape, num_elements: int, costs: CoreCosts, cores: Cores) -> float:
    """Return the total core time of an fp32 all-reduce on these cores."""
    total_s = 0.0
    for phase in plan.phases:
        if phase.axis == "node":
            passes = 2 if phase.op == "all_reduce" else 1  # adding, copying
            total_s += passes * cores.tensors_touched * FP32_BYTES * costs.memory_s_per_byte
        else:
            sent = cores.members(phase.axis) * bytes_of_member(phase.axis, shape, phase.dtype)
            total_s += sent * core_s_per_byte(phase.axis, shape, phase.dtype, costs)
    return total_s * num_elements


class StepTime(NamedTuple):
    """A training step on cores that ranks share."""

    wire_s: float  # computation and exposed all-reduces, as if all-reduces used no cores
    cores_s: float  # all work of the cores

    def seconds(self, unhidden: float) -> float:
        """Return the time of both, overlapped except for the part `unhidden` of the shorter one."""
        return max(self.wire_s, self.cores_s) + unhidden * min(self.wire_s, self.cores_s)
