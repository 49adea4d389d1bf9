"""The ranks that sum together, along each axis of their topology: shared memory in the node, the engine elsewhere."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megabatch.comm.engine import Engine
from megabatch.comm.shared_memory import SharedMemory
from megabatch.planning.topology import Axis, Topology, from_hosts
from megabatch.ranks.discover import host_identity

AXES: tuple[Axis, ...] = ("node", "masters", "across", "all")


class Groups:
    """Opens what plans need, and closes it.  Every rank of `parent` makes it, with the same arguments.

    Ranks here are places in `parent`; `names` are their global ranks.
    """

    def __init__(self, parent: Any, device: torch.device, timeout_s: float) -> None:
        self.parent, self.device, self.timeout_s = parent, device, timeout_s
        self.names = tuple(dist.get_process_group_ranks(parent))
        self.rank = dist.get_rank(parent)
        found: list[Any] = [None] * len(self.names)
        free_bytes = SharedMemory.free_bytes() if self.may_share() else None
        dist.all_gather_object(found, (host_identity(), free_bytes), group=parent)
        self.topology: Topology = from_hosts([host for host, _ in found])
        # Of the host that has least; None: nobody shares any.
        self.shareable_bytes = min((room for _, room in found if room is not None), default=None)
        self.store = self.own_store()
        self.memory: SharedMemory | None = None
        self.engines: dict[Axis, Engine] = {}
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
                self.engines[axis] = self.open_engine(axis, members)

    def open_memory(self, members: tuple[int, ...]) -> SharedMemory:
        store = dist.PrefixStore(f"node-{members[0]}", self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        return SharedMemory(store, members.index(self.rank), len(members), self.timeout_s, names)

    def open_engine(self, axis: Axis, members: tuple[int, ...]) -> Engine:
        store = dist.PrefixStore(f"{axis}-{members[0]}", self.store)  # type: ignore[attr-defined]
        names = [self.names[member] for member in members]
        # Two contributions have one sum, in whatever order: Gloo's own is a tenth faster than a direct exchange.
        sums_itself = axis == "all" or len(members) == 2 or self.device.type == "cuda"
        engine = Engine(store, members.index(self.rank), names, self.timeout_s, self.device, sums_itself)
        self.stack.callback(engine.close)
        return engine

    def abandon(self) -> None:
        """This rank has given up: whoever waits for it here need not, nor does it wait for others any more."""
        for engine in self.engines.values():
            engine.abandon()
        if self.memory:
            self.memory.close()

    def close(self) -> None:
        self.stack.close()
        self.engines = {}
        self.memory = None
