"""Gradients summed over ranks while backward still runs: DistributedDataParallel with a hook of our own."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.world import World


class BucketClock:
    """When the newest gradient bucket was ready: from the last one on, backward waits for other ranks."""

    ready_s = 0.0


def sum_bucket(
    clock: BucketClock,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP would average.  Our losses are divided by the global batch already, so the gradient is the plain sum."""
    clock.ready_s = time.perf_counter()
    future: torch.futures.Future[list[torch.Tensor]]
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def distribute(model: nn.Module, world: World) -> tuple[DistributedDataParallel, BucketClock]:
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # The trainer keeps BatchNorm's statistics equal on all ranks itself; DDP would overwrite them with rank 0's.
        forward_sync_buffers=False,
    )
    clock = BucketClock()
    wrapped.register_comm_hook(clock, sum_bucket)
    return wrapped, clock
