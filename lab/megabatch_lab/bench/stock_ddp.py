"""The peer of `megabatch bench train`: plain DistributedDataParallel with its best settings.

It uses DDP's default buckets and averaging, `no_sync` during accumulation, gradients as views of the buckets, fused
SGD and channels_last.  Images are in memory, and are cropped and flipped per batch.  The loss is read once per
step.  This file imports nothing from megabatch.  The caller passes the model and the images, so that both arms train
the same model.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train_stock(
    model: nn.Module,
    images: torch.Tensor,  # uint8 [N, C, H, W]
    labels: torch.Tensor,
    device: torch.device,
    global_batch: int,
    microbatch: int,
    learning_rate: float,
    crop_padding: int,
    label_smoothing: float,
) -> Iterator[float]:
    """Train forever; yield the loss after every step."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    accumulation = global_batch // (microbatch * num_ranks)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=learning_rate, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    pixels = images.double()
    mean, deviation = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True)
    mean, deviation = mean.float().to(device), deviation.float().to(device)
    size = images.shape[-1]
    epoch = 0
    while True:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(images) - global_batch + 1, global_batch):
            mine = order[start : start + global_batch][rank::num_ranks]
            optimizer.zero_grad(set_to_none=accumulation == 1)  # the faster choice
            total = torch.zeros((), device=device)
            for turn, chosen in enumerate(mine.split(microbatch)):
                x = F.pad(images[chosen], [crop_padding] * 4).unfold(2, size, 1).unfold(3, size, 1)
                rows, columns = torch.randint(2 * crop_padding + 1, (2, len(chosen)))
                x = x[torch.arange(len(chosen)), :, rows, columns]
                x = torch.where((torch.rand(len(chosen)) < 0.5)[:, None, None, None], x.flip(3), x)
                x = x.to(device, non_blocking=True).to(torch.float32, memory_format=torch.channels_last)
                y = labels[chosen].to(device)
                with nullcontext() if turn == accumulation - 1 else ddp.no_sync():
                    logits = ddp(x.sub_(mean).div_(deviation))
                    loss = F.cross_entropy(logits, y, label_smoothing=label_smoothing) / accumulation
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            scheduler.step()
            yield total.item()
        epoch += 1
