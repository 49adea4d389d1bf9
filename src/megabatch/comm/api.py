"""DDP's communication hook.

megabatch.comm.attach(ddp_model)        one line in a script that has DistributedDataParallel already
distribute(model, ...)                  what our own trainer does
"""

import atexit
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.comm.layouts import DTYPE_NAMES
from megabatch.comm.settings import CommSettings
from megabatch.errors import UserError
from megabatch.planning.pipeline import Gradient, RecordedBackward
from megabatch.planning.plan import CommDtype
from megabatch.planning.tuning import Tuning
from megabatch.ranks.world import World
from megabatch.torch_api import keep_own_buffers, stop_runtime_statistics


def reduce_bucket(
    gradients: GradientAllReduce,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook, as DDP wants it: a function of a state and a bucket."""
    return gradients.start_bucket(bucket)


def distribute(
    model: nn.Module,
    world: World,
    settings: CommSettings,
    backward: RecordedBackward | None = None,
    stored: Tuning | None = None,
) -> tuple[DistributedDataParallel, GradientAllReduce]:
    """Wraps a model so that backward leaves the sum over ranks in the gradients.  DDP would average; our losses are
    divided by the global batch already.

    Buckets and plans are those of `stored`, where these are the ranks and gradients that it was made for; otherwise
    they are chosen here, for a recorded backward pass or else for gradients that are all ready at once.
    """
    gradients = GradientAllReduce(
        model,
        dist.group.WORLD,
        world.device,
        settings,
        tunes=True,
        backend=world.backend,
        topology=world.topology,
        activity=world.activity,
        last_words=world.last_words,
    )
    world.closing.enter_context(gradients)
    tuning = gradients.tune(backward or ready_at_once(model), stored)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type != "cpu" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb_list=tuning.caps_mb,  # type: ignore[arg-type]  # whole or not
    )
    wrapped.register_comm_hook(gradients, reduce_bucket)
    keep_own_buffers(wrapped)  # the trainer keeps BatchNorm's statistics equal on all ranks itself
    stop_runtime_statistics(wrapped)
    return wrapped, gradients


def ready_at_once(model: nn.Module) -> RecordedBackward:
    """In the order in which DDP expects them."""
    named = [(name, p) for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    return RecordedBackward([name for name, _ in named], [gradient_of(p) for _, p in named], [0.0] * len(named))


def gradient_of(parameter: nn.Parameter) -> Gradient:
    return Gradient(parameter.numel() * parameter.element_size(), DTYPE_NAMES[parameter.dtype])


def attach(
    model: DistributedDataParallel,
    *,
    algorithm: str = "auto",
    dtype: CommDtype = "fp32",
    timeout_s: float = 600.0,
    loss_is_scaled: bool = False,
) -> GradientAllReduce:
    """Gives megabatch's all-reduce to a DistributedDataParallel model; gradients are averaged, as DDP does.

    Call it on every rank, once, before the first backward.  `dtype="bf16"` halves the bytes between hosts; "fp16" too,
    but small gradients vanish in it unless the loss is scaled (torch.amp.GradScaler): then say `loss_is_scaled=True`.
    """
    if dtype == "fp16" and not loss_is_scaled:
        raise UserError("dtype='fp16' loses small gradients unless the loss is scaled; nearest: dtype='bf16'")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UserError(f"{name} has sparse gradients, which have no place in a bucket; nearest: sparse=False")
    settings = CommSettings(algorithm=algorithm, dtype=dtype, timeout_s=timeout_s)
    device = next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
    group = model.process_group
    with ExitStack() as stack:
        gradients = stack.enter_context(
            GradientAllReduce(model.module, group, device, settings, scale=1 / dist.get_world_size(group))
        )
        model.register_comm_hook(gradients, reduce_bucket)
        atexit.register(gradients.close)
        stack.pop_all()
    return gradients
