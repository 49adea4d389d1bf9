"""What a run would be: steps, parameter groups, bytes.  Nothing is started, and nothing is written."""

from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megabatch.comm.discover import usable_cores
from megabatch.comm.world import choose_device
from megabatch.config import RunConfig
from megabatch.data.sources import load_data_set
from megabatch.models.catalog import model_errors
from megabatch.models.loss import summed_loss
from megabatch.optim.groups import parameter_groups
from megabatch.planning.batch import StepPlan, check_ranks, most_ranks
from megabatch.train.assemble import make_model, plan_learning_rate, plan_run


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes on one rank."""

    weights: int  # parameters and buffers
    gradients: int  # DDP's buckets; the gradients are views of them
    optimizer: int
    activations: int | None  # what one microbatch keeps for its backward pass; None where that cannot be foreseen

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + (self.activations or 0)


class Preview(Struct, frozen=True, kw_only=True):
    plan: StepPlan
    learning_rate: Callable[[int], float]
    groups: list[dict[str, Any]]
    memory: Memory


def choose_ranks(config: RunConfig, wanted: int | None) -> int:
    """The ranks that were asked for, or one per GPU, on CPU one per core, as far as they divide the microbatches."""
    device_type = choose_device(config.run.device)
    if wanted is not None:
        check_ranks(config.batch, wanted)
        return wanted
    return most_ranks(config.batch, torch.cuda.device_count() if device_type == "cuda" else len(usable_cores()))


def preview(config: RunConfig, num_ranks: int) -> Preview:
    data = load_data_set(config.data)
    plan = plan_run(config, data, num_ranks)
    model = make_model(config, data).to(config.precision.dtype)
    groups = parameter_groups(model, config.optim.weight_decay)
    trained = [parameter for group in groups for parameter in group["params"]]
    image_shape = (data.num_channels, config.data.image_size, config.data.image_size)
    memory = Memory(
        weights=num_bytes([*model.parameters(), *model.buffers()]),
        gradients=num_bytes(trained),
        optimizer=num_bytes(trained) if config.optim.momentum else 0,
        activations=activation_bytes(config, model, image_shape),
    )
    return Preview(plan=plan, learning_rate=plan_learning_rate(config, plan), groups=groups, memory=memory)


def num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def activation_bytes(config: RunConfig, model: nn.Module, image_shape: tuple[int, ...]) -> int | None:
    """Runs one microbatch forward on the meta device, which computes shapes only, and adds up what autograd keeps."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = 0.1  # the plain average would read its counter, which has no value here
    model = model.to("meta")
    owned = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # by storage: a tensor kept twice takes its bytes once

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = storage
        return tensor

    images = torch.empty(config.batch.microbatch, *image_shape, dtype=config.precision.dtype, device="meta")
    labels = torch.empty(config.batch.microbatch, dtype=torch.int64, device="meta")
    try:
        with (
            model_errors(config.model, images.shape),
            torch.autograd.graph.saved_tensors_hooks(keep, keep),
        ):
            summed_loss(config.loss, model(images), labels)
    except (RuntimeError, NotImplementedError):  # a forward that looks at values
        return None
    return sum(storage.nbytes() for storage in kept.values())
