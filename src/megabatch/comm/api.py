"""Entry points of the all-reduce, as a communication hook of DDP.

megabatch.comm.attach(ddp_model)    for scripts that use DistributedDataParallel
distribute(model, ...)              for our trainer
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
from megabatch.torch_api import disable_buffer_broadcast, stop_runtime_statistics


def reduce_bucket(
    gradients: GradientAllReduce,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce of a bucket.  DDP calls this hook with its state and the bucket."""
    return gradients.start_bucket(bucket)


def distribute(
    model: nn.Module,
    world: World,
    settings: CommSettings,
    backward: RecordedBackward | None = None,
    stored: Tuning | None = None,
) -> tuple[DistributedDataParallel, GradientAllReduce]:
    """Wrap a model in DistributedDataParallel so that backward all-reduces gradients with a sum.

    DDP would average them; the trainer's losses are already divided by the global batch.

    Args:
        model: The network, on the device of `world`.
        world: The ranks, their topology and their backend.
        settings: The `comm` section of a recipe.
        backward: A recorded backward pass, for which buckets and plans are chosen. By default all gradients are assumed
            to be ready at once.
        stored: Buckets and plans of an earlier run. They are used if they were made for the same ranks and gradients.

    Returns:
        The wrapped model, and the all-reduce of its gradients. `world` closes the latter.

    Raises:
        UserError: The settings do not fit the ranks, or the networks of the ranks differ.

    Examples:
        >>> with connect(current_rank(), "cpu") as world:
        ...     model, gradients = distribute(nn.Linear(4, 2), world, CommSettings())
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     model.module.bias.grad
        tensor([1., 1.])
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
        exit_reporter=world.exit_reporter,
    )
    world.closing.enter_context(gradients)
    world.explain = gradients.failure.explain_collective
    world.leaving.append(gradients.failure.leave)
    tuning = gradients.tune(backward or ready_at_once(model), stored)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type != "cpu" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb_list=tuning.caps_mb,  # type: ignore[arg-type]  # ints or floats
    )
    wrapped.register_comm_hook(gradients, reduce_bucket)
    disable_buffer_broadcast(wrapped)  # the trainer keeps the statistics of BatchNorm equal on all ranks
    stop_runtime_statistics(wrapped)
    return wrapped, gradients


def ready_at_once(model: nn.Module) -> RecordedBackward:
    """Return a backward pass in which all gradients are ready at once, in the order of DDP."""
    named = [(name, p) for name, p in reversed(list(model.named_parameters())) if p.requires_grad]
    return RecordedBackward([name for name, _ in named], [gradient_of(p) for _, p in named], [0.0] * len(named))


def gradient_of(parameter: nn.Parameter) -> Gradient:
    return Gradient(parameter.numel() * parameter.element_size(), DTYPE_NAMES[parameter.dtype])


def attach(
    model: DistributedDataParallel,
    *,
    algorithm: str = "auto",
    dtype: CommDtype = "same",
    timeout_s: float = 600.0,
    loss_is_scaled: bool = False,
    noise_every: int = 0,
) -> GradientAllReduce:
    """Replace the all-reduce of a DistributedDataParallel model by megabatch's.

    Call it once on every rank, before the first backward. Gradients are averaged, as in DDP.

    Args:
        model: The wrapped model.
        algorithm: "auto" measures the links and chooses; otherwise the name of an algorithm, such as "hierarchical".
        dtype: The comm dtype between nodes. "bf16" halves the bytes of fp32 gradients. So does "fp16", but small
            gradients become 0 in it unless the loss is scaled.
        timeout_s: Seconds after which a rank that has not arrived is reported and the process ends.
        loss_is_scaled: Confirms that the loss is scaled (torch.amp.GradScaler), which dtype="fp16" requires.
        noise_every: Steps between measurements of the gradient noise scale, which `noise_scale` of the result returns;
            0 measures none. Right after a GradScaler changed its scale, steps at the larger scale weigh more.

    Returns:
        The all-reduce. It is closed when the process exits.

    Raises:
        UserError: dtype="fp16" without a scaled loss, a parameter with sparse gradients, or an invalid setting.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(nn.Linear(4, 2))
        >>> gradients = attach(model)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> model.module.bias.grad
        tensor([1., 1.])
    """
    if dtype == "fp16" and not loss_is_scaled:
        raise UserError("dtype='fp16' loses small gradients unless the loss is scaled; nearest: dtype='bf16'")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UserError(f"{name} has sparse gradients, but buckets are dense; nearest: sparse=False")
    if noise_every < 0:
        raise UserError(f"noise_every={noise_every}: expected at least 0; for example noise_every=20")
    settings = CommSettings(algorithm=algorithm, dtype=dtype, timeout_s=timeout_s)
    device = next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
    group = model.process_group
    with ExitStack() as stack:
        gradients = stack.enter_context(
            GradientAllReduce(
                model.module,
                group,
                device,
                settings,
                scale=1 / dist.get_world_size(group),
                noise_every=noise_every,
            )
        )
        model.register_comm_hook(gradients, reduce_bucket)
        atexit.register(gradients.close)
        stack.pop_all()
    return gradients
