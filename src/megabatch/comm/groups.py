"""The ranks that work together along each axis of their topology: by shared memory in the node, elsewhere by a process
group of Gloo, or of NCCL on accelerators."""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.accelerator.device_group import DeviceGroup
from megabatch.comm.cpu.process_group import ProcessGroup
from megabatch.comm.cpu.shared_memory import SharedMemory
from megabatch.planning.topology import Axis, Topology, from_hosts
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.collectives import digest, gather_numbers
from megabatch.ranks.machine import host_identity, is_stopped, notice_lost_hosts
from megabatch.torch_api import default_store

AXES: tuple[Axis, ...] = ("node", "leaders", "inter_node", "all")
UNSHARED = 2**63 - 1  # bytes, of a host whose ranks share no memory


class Groups:
    """Opens what plans need, and closes it.  Every rank of `parent` makes it, with the same arguments.

    Ranks here are those of `parent`; `names` are their global ranks.
    """

    def __init__(
        self,
        parent: Any,
        device: torch.device,
        timeout_s: float,
        backend: Backend | None = None,  # that of the device
        topology: Topology | None = None,  # as the ranks say
    ) -> None:
        self.parent, self.device, self.timeout_s = parent, device, timeout_s
        self.backend = backend or BACKENDS[device.type]
        self.names = tuple(dist.get_process_group_ranks(parent))
        self.rank = dist.get_rank(parent)
        self.topology: Topology = topology or self.ask_for_hosts()
        self.shareable_bytes = self.least_free_bytes()
        self.store = self.own_store()
        self.memory: SharedMemory | None = None
        self.process_groups: dict[Axis, ProcessGroup | DeviceGroup] = {}
        self.num_opened: Counter[Axis] = Counter()
        self.has_aborted = False
        self.stack = ExitStack()

    def may_share(self) -> bool:
        return self.device.type == "cpu" and SharedMemory.is_supported()

    def ask_for_hosts(self) -> Topology:
        """Of every rank 8 bytes."""
        return from_hosts([host for (host,) in gather_numbers([digest(host_identity())], self.device, self.parent)])

    def least_free_bytes(self) -> int | None:
        """Of the host that has least shared memory; None: nobody shares any."""
        if self.device.type != "cpu":
            return None
        least = torch.tensor([SharedMemory.free_bytes() if self.may_share() else UNSHARED])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.parent)
        return None if least == UNSHARED else int(least)

    def own_store(self) -> Any:
        """Of these ranks and this object alone.  A key has at most 8 KB: it does not name 2,048 ranks."""
        name = f"megabatch/{digest('-'.join(map(str, self.names))):x}"
        store = dist.PrefixStore(name, default_store())  # type: ignore[attr-defined]
        return dist.PrefixStore(str(store.add(f"opened-by-{self.rank}", 1)), store)  # type: ignore[attr-defined]

    def open(self, axes: Iterable[Axis]) -> None:
        """Those of them that are not open yet.  All ranks call it, with the same axes."""
        for axis in sorted(axes, key=AXES.index):  # all ranks in the same order
            members = self.topology.members(axis, self.rank)
            if len(members) < 2 or axis in self.process_groups:
                continue
            if axis == "node" and self.may_share():
                self.memory = self.memory or self.stack.enter_context(self.open_memory(members))
            else:
                self.process_groups[axis] = self.open_process_group(axis, members)
        notice_lost_hosts()

    def close_others(self, axes: Iterable[Axis]) -> None:
        """The process groups of all other axes, which no plan uses any more; what they have measured with, too.

        All ranks call it, with the same axes, when nothing is on the way.  Shared memory stays: the default plan of
        hosts that have it uses it.
        """
        for axis in sorted(set(self.process_groups) - set(axes), key=AXES.index):
            self.process_groups.pop(axis).close()
        for group in self.process_groups.values():
            group.free_buffers()

    def open_memory(self, members: tuple[int, ...]) -> SharedMemory:
        store = dist.PrefixStore(f"node-{members[0]}", self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        return SharedMemory(store, members.index(self.rank), len(members), self.timeout_s, names)

    def open_process_group(self, axis: Axis, members: tuple[int, ...]) -> ProcessGroup | DeviceGroup:
        self.num_opened[axis] += 1  # a second one must not find the addresses of the first
        name = f"{axis}-{members[0]}-{self.num_opened[axis]}"
        store = dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        index, join = members.index(self.rank), self.backend.join
        group: ProcessGroup | DeviceGroup
        if self.device.type == "cpu":
            # Two contributions have one sum, in whatever order: Gloo's own is a tenth faster than a direct exchange.
            uses_backend = axis == "all" or len(members) == 2
            group = ProcessGroup(store, index, names, self.timeout_s, join, uses_backend)
        else:
            group = DeviceGroup(store, index, names, self.timeout_s, self.device, join)
        self.stack.callback(group.close)
        return group

    def set_timeout(self, seconds: float) -> None:
        """Of operations that are begun from now on, or wait: it differs between start-up and steps."""
        for group in tuple(self.process_groups.values()):
            if isinstance(group, ProcessGroup):
                group.timeout_s = seconds
        if self.memory:
            self.memory.barrier.timeout_s = seconds

    def stopped_ranks(self) -> list[str]:
        """Of this host, what is to be said of those that hear and say nothing."""
        if not self.memory:
            return []
        barrier = self.memory.barrier
        stopped = [(barrier.names[rank], pid) for rank, pid in enumerate(barrier.pids) if is_stopped(pid)]
        return [f"rank {name} is stopped (process {pid}), by a signal such as SIGSTOP" for name, pid in stopped]

    def abort(self) -> None:
        """This rank aborts: whoever waits for it here need not, nor does it wait for others any more."""
        self.has_aborted = True
        for group in self.process_groups.values():
            group.abort()
        if self.memory:
            self.memory.close()

    def close(self) -> None:
        self.stack.close()
        self.process_groups = {}
        self.memory = None
