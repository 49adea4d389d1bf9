"""The ranks that work together along each axis of their topology: by shared memory in the node, elsewhere by a process
group of Gloo or NCCL."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megabatch.comm.process_group import ProcessGroup
from megabatch.comm.shared_memory import SharedMemory
from megabatch.planning.topology import Axis, Topology, from_hosts
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.machine import host_identity

AXES: tuple[Axis, ...] = ("node", "leaders", "inter_node", "all")


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
        found: list[Any] = [None] * len(self.names)
        free_bytes = SharedMemory.free_bytes() if self.may_share() else None
        dist.all_gather_object(found, (host_identity(), free_bytes), group=parent)
        self.topology: Topology = topology or from_hosts([host for host, _ in found])
        # Of the host that has least; None: nobody shares any.
        self.shareable_bytes = min((room for _, room in found if room is not None), default=None)
        self.store = self.own_store()
        self.memory: SharedMemory | None = None
        self.process_groups: dict[Axis, ProcessGroup] = {}
        self.stack = ExitStack()

    def may_share(self) -> bool:
        return self.device.type == "cpu" and SharedMemory.is_supported()

    def own_store(self) -> Any:
        """Of these ranks and this object alone."""
        name = f"megabatch/{'-'.join(map(str, self.names))}"
        store = dist.PrefixStore(name, _get_default_store())  # type: ignore[attr-defined]
        return dist.PrefixStore(str(store.add(f"opened-by-{self.rank}", 1)), store)  # type: ignore[attr-defined]

    def open(self, axes: Iterable[Axis]) -> None:
        for axis in sorted(axes, key=AXES.index):  # all ranks in the same order
            members = self.topology.members(axis, self.rank)
            if len(members) < 2:
                continue
            if axis == "node" and self.may_share():
                self.memory = self.stack.enter_context(self.open_memory(members))
            else:
                self.process_groups[axis] = self.open_process_group(axis, members)

    def open_memory(self, members: tuple[int, ...]) -> SharedMemory:
        store = dist.PrefixStore(f"node-{members[0]}", self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        return SharedMemory(store, members.index(self.rank), len(members), self.timeout_s, names)

    def open_process_group(self, axis: Axis, members: tuple[int, ...]) -> ProcessGroup:
        store = dist.PrefixStore(f"{axis}-{members[0]}", self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        # Two contributions have one sum, in whatever order: Gloo's own is a tenth faster than a direct exchange.
        uses_backend = axis == "all" or len(members) == 2 or self.device.type == "cuda"
        index, join = members.index(self.rank), self.backend.join
        group = ProcessGroup(store, index, names, self.timeout_s, self.device, join, uses_backend)
        self.stack.callback(group.close)
        return group

    def abort(self) -> None:
        """This rank aborts: whoever waits for it here need not, nor does it wait for others any more."""
        for group in self.process_groups.values():
            group.abort()
        if self.memory:
            self.memory.close()

    def close(self) -> None:
        self.stack.close()
        self.process_groups = {}
        self.memory = None
