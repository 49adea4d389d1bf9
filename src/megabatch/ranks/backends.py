"""What carries collectives between the devices of a kind.  Benches and tests hand in backends of their own."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from megabatch.torch_api import nccl_options

Join = Callable[[Any, int, int, timedelta], Any]  # store, index, size, timeout


class Backend(NamedTuple):
    name: str  # of the default process group, as torch.distributed knows it
    join: Join  # makes a process group of our own beside it, for members that share a store


def join_gloo(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, index, size, timeout)


def join_nccl(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupNCCL(store, index, size, nccl_options(timeout))


BACKENDS = {"cpu": Backend("gloo", join_gloo), "cuda": Backend("nccl", join_nccl)}  # ROCm's devices are cuda too
