"""Links between hosts whose ranks compute on CPUs: the wire, and the cores that push bytes through it and add them up.

A rank on a CPU sends, receives, rounds and adds up itself, so ranks that share cores take turns.  Per byte that a
member of a group sends, with w the seconds of its host's network card (of all that leaves the busiest host) and c
those of the cores (of all that ranks on them do),
    beta = max(w, c) + unhidden min(w, c),
since bytes travel while others are added up, but for the first and the last of what follows each other.  What cores do
(`CoreCosts`, one core's seconds per byte):
    ring         the backend's own all-reduce, of fp32: over all ranks, or between two members
    exchange     the three stages of comm/cpu/process_group.py among more than two members
    exchange_16  16 bits travel: with rounding
    memory       adding up, or copying, in the shared memory of a host
Adding up is part of these, so gamma is 0.  Between hosts, cores also do what the plan does inside each host: parts of a
bucket are in both at once.

Hosts of a cluster have cores of their own; hosts that are namespaces of one machine (`hosts_on_machine`) share its.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from megabatch.planning.cost import OPS, Link, bytes_crossing, elements_of_busiest
from megabatch.planning.pipeline import PART_BYTES
from megabatch.planning.plan import BLOCK, COMM_DTYPES, CommDtype, Phase, Plan
from megabatch.planning.topology import Axis, ClusterShape, Topology

FP32_BYTES = COMM_DTYPES["fp32"].num_bytes


class CoreCosts(Struct, frozen=True, kw_only=True):
    """Of one core; a byte between ranks is sent and received."""

    ring_s_per_byte: float
    exchange_s_per_byte: float
    exchange_16_s_per_byte: float
    memory_s_per_byte: float
    step_s: float  # latency of a message between ranks that have a core each
    memory_step_s: float  # of a barrier in shared memory
    wire_share: float  # of the nominal rate, that TCP carries: the rest is headers
    exchange_gaps: float  # what stages that wait for each other leave idle of the wire; see exchange_idle
    unhidden: float  # of the lesser of wire and cores, where messages follow each other
    leaders_unhidden: float  # where those of a host go through one rank, for which the others wait
    exchange_unhidden: float  # where the stages of an exchange wait for each other
    step_unhidden: float = 0.0  # of the lesser of wire and cores in a step of training


class Cores(NamedTuple):
    """Where work is done: the ranks that share cores, as numbers of them."""

    hosts: Mapping[int, int]  # hosts on these cores, by their ranks
    num_cores: float

    @property
    def num_hosts(self) -> int:
        return sum(self.hosts.values())

    @property
    def num_ranks(self) -> int:
        return sum(size * count for size, count in self.hosts.items())

    @property
    def tensors_touched(self) -> int:
        """How often a tensor's size is added up in shared memory, or copied: k-1 times in a host of k ranks."""
        return sum((size - 1) * count for size, count in self.hosts.items())

    def members(self, axis: Axis) -> int:
        """Of all groups of the axis."""
        return self.num_hosts if axis == "leaders" else self.num_ranks

    @property
    def turns(self) -> float:
        """Ranks that share a core compute in turns, so all that a rank does takes as many times as long."""
        return max(1.0, self.num_ranks / self.num_cores)

    def seconds(self, core_s: float, num_at_once: int) -> float:
        """What work takes that so many ranks share evenly; a rank has one core at most."""
        return core_s / min(self.num_cores, num_at_once)


def cores_of(shape: ClusterShape, num_cores: float, hosts_on_machine: bool) -> Cores:
    """Of the machine that all hosts share, or of the busiest host."""
    return Cores(dict(shape.node_sizes) if hosts_on_machine else {shape.largest_node: 1}, num_cores)


def cpu_links(
    shape: ClusterShape,
    dtype: CommDtype,
    costs: CoreCosts,
    gbps: float,
    num_cores: float,  # of the machine, or of each host; a fraction where work does not spread evenly
    hosts_on_machine: bool,
) -> dict[Axis, Link]:
    """Along every axis that ranks of this cluster have, in the dtype that travels between hosts."""
    cores = cores_of(shape, num_cores, hosts_on_machine)
    links: dict[Axis, Link] = {}
    if shape.largest_node > 1:
        links["node"] = memory_link(shape, costs, cores)
    axes: tuple[Axis, ...] = ("all", "leaders", "inter_node") if shape.is_regular else ("all", "leaders")
    for axis in axes if shape.num_nodes > 1 else ():
        links[axis] = network_link(axis, shape, dtype, costs, gbps, cores)
    return links


def memory_link(shape: ClusterShape, costs: CoreCosts, cores: Cores) -> Link:
    """The ranks of a host work at once, and the hosts that share cores too."""
    k = shape.largest_node
    # Per byte of the busiest rank, which touches (k-1)/k of a tensor.
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
    if axis != "all":  # parts of a bucket are added up in the hosts meanwhile
        cores_s += cores.seconds(memory_core_s_per_byte(axis, shape, dtype, costs, cores), cores.num_ranks)
    unhidden = max(
        costs.exchange_unhidden if staged else costs.unhidden,
        costs.leaders_unhidden if axis == "leaders" and shape.largest_node > 1 else 0.0,
    )
    byte_s = max(wire_s, cores_s) + unhidden * min(wire_s, cores_s)
    # The steps of a whole part pass while others' bytes do, so it takes its bytes; what is smaller takes its steps.
    num_steps = 2 * (shape.largest_group(axis) - 1)
    part_bytes = bytes_of_member(axis, shape, dtype) * PART_BYTES / FP32_BYTES
    step_s = min(costs.step_s * max(1.0, num_members / cores.num_cores), byte_s * part_bytes / num_steps)
    return Link(step_s, byte_s - num_steps * step_s / part_bytes, 0.0)


def core_s_per_byte(axis: Axis, shape: ClusterShape, dtype: CommDtype, costs: CoreCosts) -> float:
    if COMM_DTYPES[dtype].num_bytes < FP32_BYTES:
        return costs.exchange_16_s_per_byte
    return costs.exchange_s_per_byte if in_stages(axis, shape, dtype) else costs.ring_s_per_byte


def in_stages(axis: Axis, shape: ClusterShape, dtype: CommDtype) -> bool:
    """As comm/cpu/process_group.py: two members send each other everything; fp32 over all ranks is the backend's."""
    is_backends = axis == "all" and dtype == "fp32"
    return shape.largest_group(axis) > 2 and not is_backends


def exchange_idle(axis: Axis, shape: ClusterShape, costs: CoreCosts) -> float:
    """How long the wire idles in an exchange, for each second of its bytes.

    Stages wait for the slowest of their messages.  Plain TCP that exchanges like this, without ranks
    (bench/exchange_stream.py), idles for 0.14, 0.25, 0.33, 0.38 and 0.41 on 2, 3, 4, 6 and 8 hosts, at 0.5 to
    2.5 Gb/s much the same: about 0.55 (1 - 1/H)^2.  What one rank leaves idle, others of its host fill.
    """
    num_at_once = 1 if axis == "leaders" else shape.largest_node
    return costs.exchange_gaps * gaps_of_hosts(shape.num_nodes) / num_at_once


def gaps_of_hosts(num_hosts: int) -> float:
    """As a part of those of very many."""
    return (1 - 1 / num_hosts) ** 2


def wire_bytes(axis: Axis, shape: ClusterShape, dtype: CommDtype) -> float:
    """That leave the busiest host for each byte that the busiest member of a group sends, in an all-reduce."""
    phase = Phase("all_reduce", axis, dtype)
    num_elements = BLOCK * shape.num_ranks * shape.num_nodes  # slices are equal along every axis
    width = COMM_DTYPES[dtype].num_bytes
    leaving = max(bytes_crossing(Plan("", (phase,)), consecutive(shape), num_elements, FP32_BYTES))
    sent = sum(elements_of_busiest(half, num_elements, shape.largest_group(axis)) for half in OPS["all_reduce"])
    return leaving / (sent * width)


def consecutive(shape: ClusterShape) -> Topology:
    """Ranks of a host one after another."""
    nodes: list[tuple[int, ...]] = []
    for size, count in shape.node_sizes:
        for _ in range(count):
            begin = nodes[-1][-1] + 1 if nodes else 0
            nodes.append(tuple(range(begin, begin + size)))
    return Topology(tuple(nodes))


def memory_core_s_per_byte(axis: Axis, shape: ClusterShape, dtype: CommDtype, costs: CoreCosts, cores: Cores) -> float:
    """What is added up and copied inside hosts, before and after, for each byte that a member sends between them."""
    touched_bytes = 2 * cores.tensors_touched * FP32_BYTES  # of an element
    return touched_bytes * costs.memory_s_per_byte / bytes_of_member(axis, shape, dtype)


def bytes_of_member(axis: Axis, shape: ClusterShape, dtype: CommDtype) -> float:
    """That it sends for each element of a tensor: of an all-reduce of what its group holds."""
    held = 1 / shape.largest_node if axis == "inter_node" else 1.0
    num_members = shape.largest_group(axis)
    return 2 * held * (num_members - 1) / num_members * COMM_DTYPES[dtype].num_bytes


def core_seconds(plan: Plan, shape: ClusterShape, num_elements: int, costs: CoreCosts, cores: Cores) -> float:
    """What an all-reduce of fp32 costs these cores, all of them together."""
    total_s = 0.0
    for phase in plan.phases:
        if phase.axis == "node":
            passes = 2 if phase.op == "all_reduce" else 1  # adding up, or copying
            total_s += passes * cores.tensors_touched * FP32_BYTES * costs.memory_s_per_byte
        else:
            sent = cores.members(phase.axis) * bytes_of_member(phase.axis, shape, phase.dtype)
            total_s += sent * core_s_per_byte(phase.axis, shape, phase.dtype, costs)
    return total_s * num_elements


class StepTime(NamedTuple):
    """A step of training on cores that ranks share."""

    wire_s: float  # computing, and the all-reduces underneath backward and behind it
    cores_s: float  # all that the cores do

    def seconds(self, unhidden: float) -> float:
        """Wire and cores work at once, but for this part of the lesser: neither is faster than its own work."""
        return max(self.wire_s, self.cores_s) + unhidden * min(self.wire_s, self.cores_s)
