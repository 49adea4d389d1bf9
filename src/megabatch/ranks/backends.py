"""The communication backend of each device type. Benches and tests pass other backends."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from megabatch.torch_api import nccl_backend, nccl_options

Join = Callable[[Any, int, int, timedelta], Any]  # store, index, size, timeout


class Backend(NamedTuple):
    name: str  # of the default process group, in torch.distributed
    join: Join  # creates an additional process group of the ranks that share a store


def join_gloo(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, index, size, timeout)


def join_nccl(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupNCCL(store, index, size, nccl_options(timeout))


BACKENDS = {"cpu": Backend("gloo", join_gloo), "cuda": Backend(nccl_backend(), join_nccl)}  # ROCm devices are cuda too
