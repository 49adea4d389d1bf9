"""The group of ranks along each axis of the topology.

Within a node, CPU ranks use shared memory.  All other groups are process groups: Gloo on CPUs, NCCL on accelerators.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.accelerator.device_group import DeviceGroup, abort_in_thread
from megabatch.comm.cpu.process_group import ProcessGroup
from megabatch.comm.cpu.shared_memory import SharedMemory
from megabatch.planning.topology import Axis, Topology, from_hosts
from megabatch.ranks.backends import BACKENDS, Backend, Join
from megabatch.ranks.collectives import digest, gather_numbers
from megabatch.ranks.machine import enable_keepalive, host_identity, is_stopped
from megabatch.torch_api import default_store

AXES: tuple[Axis, ...] = ("node", "leaders", "inter_node", "all")
NOT_SHARED = 2**63 - 1  # bytes of a node whose ranks share no memory


class Groups:
    """Opens and closes the groups that plans need.  Every rank of `parent` creates it, with the same arguments.

    Ranks are those of `parent`.  `names` are their global ranks.
    """

    def __init__(
        self,
        parent: Any,
        device: torch.device,
        timeout_s: float,
        backend: Backend | None = None,  # default: the device's
        topology: Topology | None = None,  # default: discovered from the hosts of the ranks
    ) -> None:
        self.parent, self.device, self.timeout_s = parent, device, timeout_s
        self.backend = backend or BACKENDS[device.type]
        self.names = tuple(dist.get_process_group_ranks(parent))
        self.rank = dist.get_rank(parent)
        self.topology: Topology = topology or self.discover_topology()
        self.shareable_bytes = self.min_free_bytes()
        self.store = self.make_store()
        self.memory: SharedMemory | None = None
        self.opened = set[Axis]()  # whose groups exist, though this rank may be in none of them
        self.process_groups: dict[Axis, ProcessGroup | DeviceGroup] = {}
        self.num_opened: Counter[Axis] = Counter()
        self.has_aborted = False
        self.stack = ExitStack()

    def can_share_memory(self) -> bool:
        return self.device.type == "cpu" and SharedMemory.is_supported()

    def discover_topology(self) -> Topology:
        """Gather the hosts of all ranks, 8 bytes per rank."""
        return from_hosts([host for (host,) in gather_numbers([digest(host_identity())], self.device, self.parent)])

    def min_free_bytes(self) -> int | None:
        """Return the free shared memory of the node that has least, or None if no ranks share memory."""
        if self.device.type != "cpu":
            return None
        free = torch.tensor([SharedMemory.free_bytes() if self.can_share_memory() else NOT_SHARED])
        dist.all_reduce(free, dist.ReduceOp.MIN, group=self.parent)
        return None if free == NOT_SHARED else int(free)

    def make_store(self) -> Any:
        """Return a store for these ranks and this object.  Its prefix is a hash: 2,048 ranks exceed 8 KB."""
        name = f"megabatch/{digest('-'.join(map(str, self.names))):x}"
        store = dist.PrefixStore(name, default_store())  # type: ignore[attr-defined]
        return dist.PrefixStore(str(store.add(f"opened-by-{self.rank}", 1)), store)  # type: ignore[attr-defined]

    def open(self, axes: Iterable[Axis]) -> None:
        """Open the groups of these axes unless they are open.  All ranks call it, with the same axes."""
        for axis in sorted(set(axes) - self.opened, key=AXES.index):  # all ranks in the same order
            if max((size for size, _ in self.topology.shape.group_sizes(axis)), default=0) < 2:
                continue
            members = self.topology.members(axis, self.rank)
            if axis == "node" and self.can_share_memory():
                if len(members) > 1:
                    self.memory = self.memory or self.stack.enter_context(self.open_memory(members))
                continue
            self.opened.add(axis)
            # Every rank takes part in a split, even if it is not in any of the groups.
            color = members[0] if len(members) > 1 else None
            join = self.backend.split(self.whole, self.device, color) or self.backend.join
            if len(members) > 1:
                self.process_groups[axis] = self.open_process_group(axis, members, join)
        enable_keepalive()

    @property
    def whole(self) -> Any:
        return self.parent or dist.group.WORLD

    def close_others(self, axes: Iterable[Axis]) -> None:
        """Close the process groups of all other axes, and free the buffers used for measurements.

        All ranks call it with the same axes while no collective is in flight.  Shared memory stays open because the
        default plan uses it.
        """
        self.opened &= set(axes)
        for axis in sorted(set(self.process_groups) - set(axes), key=AXES.index):
            self.process_groups.pop(axis).close()
        for group in self.process_groups.values():
            group.free_buffers()

    def open_memory(self, members: tuple[int, ...]) -> SharedMemory:
        store = dist.PrefixStore(f"node-{members[0]}", self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        return SharedMemory(store, members.index(self.rank), len(members), self.timeout_s, names)

    def open_process_group(self, axis: Axis, members: tuple[int, ...], join: Join) -> ProcessGroup | DeviceGroup:
        self.num_opened[axis] += 1  # a group that is opened again must not read the addresses of the first
        name = f"{axis}-{members[0]}-{self.num_opened[axis]}"
        store = dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        index = members.index(self.rank)
        group: ProcessGroup | DeviceGroup
        if self.device.type == "cpu":
            # The sum of two contributions does not depend on their order, and Gloo's all-reduce is 10% faster.
            uses_backend = axis == "all" or len(members) == 2
            group = ProcessGroup(store, index, names, self.timeout_s, join, uses_backend)
        else:
            group = DeviceGroup(store, index, names, self.timeout_s, self.device, join)
        self.stack.callback(group.close)
        return group

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of current and later operations, which differs between start-up and steps."""
        for group in tuple(self.process_groups.values()):
            if isinstance(group, ProcessGroup):
                group.timeout_s = seconds
        if self.memory:
            self.memory.barrier.timeout_s = seconds

    def stopped_ranks(self) -> list[str]:
        """Return a message for each stopped process of this node, which cannot report its state itself."""
        if not self.memory:
            return []
        barrier = self.memory.barrier
        stopped = [(barrier.names[rank], pid) for rank, pid in enumerate(barrier.pids) if is_stopped(pid)]
        return [f"rank {name} is stopped (process {pid}), by a signal such as SIGSTOP" for name, pid in stopped]

    def abort(self) -> None:
        """End the collectives of this rank, so that neither it nor its peers wait any longer.

        On accelerators nothing here waits.
        """
        self.has_aborted = True
        for group in tuple(self.process_groups.values()):
            group.abort()
        if self.memory:
            self.memory.close()

    def abort_all(self) -> None:
        """Abort these groups and `parent`: while its kernels run, NCCL cannot free other communicators."""
        self.abort()
        abort_in_thread(self.whole)

    def close(self) -> None:
        self.stack.close()
        self.process_groups, self.opened = {}, set()
        self.memory = None
