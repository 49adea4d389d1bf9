"""The communication backend of each device type. Benches and tests pass other backends."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megabatch.torch_api import leave_nccl_split, nccl_backend, nccl_options, nccl_to_split, split_nccl_group

Join = Callable[[Any, int, int, timedelta], Any]  # store, index, size, timeout
Split = Callable[[Any, torch.device, int | None], Join | None]  # process group, device, color


def cannot_split(parent: Any, device: torch.device, color: int | None) -> Join | None:
    return None


class Backend(NamedTuple):
    name: str  # of the default process group, in torch.distributed
    join: Join  # creates an additional process group of the ranks that share a store
    # Divides the ranks of a process group by color; None: this rank is in no part.  All ranks of the group call it in
    # the same order, and then the returned function instead of `join`.  It returns None if the group cannot be split.
    split: Split = cannot_split


def join_gloo(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, index, size, timeout)


def join_nccl(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupNCCL(store, index, size, nccl_options(timeout))


def split_nccl(parent: Any, device: torch.device, color: int | None) -> Join | None:
    """Split a communicator off that of `parent` (ncclCommSplit).

    The ranks know their connections already, so this takes a fraction of the time of a new communicator of thousands.
    """
    whole = nccl_to_split(parent, device)
    if whole is None:
        return None
    torch.accelerator.synchronize(device)  # a split must not meet an operation of `parent` in flight
    if color is None:
        leave_nccl_split(whole, device)
        return None
    return partial(split_nccl_group, whole, color, device)


BACKENDS = {  # ROCm devices are cuda too
    "cpu": Backend("gloo", join_gloo),
    "cuda": Backend(nccl_backend(), join_nccl, split_nccl),
}
