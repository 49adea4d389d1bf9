"""Gradients summed over ranks while backward still runs: DistributedDataParallel with a hook of our own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.world import World


def sum_bucket(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP would average.  Our losses are divided by the global batch already, so the gradient is the plain sum."""
    future: torch.futures.Future[list[torch.Tensor]]
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def distribute(model: nn.Module, world: World) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # The trainer keeps BatchNorm's statistics equal on all ranks itself; DDP would overwrite them with rank 0's.
        forward_sync_buffers=False,
    )
    wrapped.register_comm_hook(None, sum_bucket)
    return wrapped
