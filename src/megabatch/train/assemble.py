"""From a recipe to the parts of a run.  Nothing below here sees the whole config."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megabatch.config.resolve import make_model, plan_groups, plan_learning_rate, plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.batches import TrainingImages
from megabatch.data.images import DataSet
from megabatch.data.normalise import Normalise, measure_pixels
from megabatch.errors import UserError
from megabatch.models.layers import freeze
from megabatch.models.loss import summed_loss
from megabatch.optim.optimizers import OPTIMIZERS
from megabatch.precision.loss_scale import choose_loss_scale
from megabatch.precision.place import place_model
from megabatch.ranks.world import World
from megabatch.train.batch_norm import RunningStatistics
from megabatch.train.evaluate import evaluate
from megabatch.train.initial_weights import load_initial_weights
from megabatch.train.loop import Parts


def never() -> bool:
    return False


def assemble(
    config: RunConfig,
    data: DataSet,
    world: World,
    network: nn.Module | None = None,  # one's own instead of the recipe's: rank 0's weights count
    stop_requested: Callable[[], bool] = never,
) -> Parts:
    plan = plan_run(config, data.shape, world.num_ranks)
    formats = config.precision.formats
    torch.backends.cudnn.benchmark = not config.run.deterministic  # which nothing on a CPU looks at
    torch.backends.cudnn.deterministic = config.run.deterministic
    model = make_model(config, data.shape) if network is None else freeze(network, config.model.freeze or [])
    initial_weights: tuple[str, ...] = ()
    if config.model.weights:
        model.to(formats.update)  # fp64 would be rounded
        initial_weights = load_initial_weights(model, config.model.weights, world)
    master_weights = place_model(model, config.precision, world.device, config.model.wants_channels_last)
    if not master_weights.weights:
        raise UserError(f"model.name={config.model.name!r} has nothing to train; set requires_grad of some parameters")
    if (
        network is not None
    ):  # ours are the same everywhere, as they follow from the seed; DDP would broadcast rounded ones
        require_same_network(master_weights.state_dict(), world)
        master_weights.load_state_dict(world.broadcast_tensors(master_weights.state_dict()))
    is_rounded_to_fp16 = formats.has_small_range or config.comm.dtype == "fp16"
    loss_scale = choose_loss_scale(config.precision, is_rounded_to_fp16, plan.global_batch)
    groups = plan_groups(config, model)
    normalise = Normalise(measure_pixels(data.train), world.device, formats.model, config.model.wants_channels_last)
    return Parts(
        world=world,
        seed=config.seed,
        plan=plan,
        data=data,
        data_fingerprint=data.fingerprint(),
        images=TrainingImages(data.train, config.data, config.seed, plan, world.device),
        normalise=normalise,
        network=model,
        update_dtype=formats.update,
        summed_loss=partial(summed_loss, config.loss),
        statistics=RunningStatistics(model, plan.accumulation, may_skip=loss_scale.is_on),
        master_weights=master_weights,
        loss_scale=loss_scale,
        optimizer=OPTIMIZERS[config.optim.name](master_weights.param_groups(groups), config.optim),
        learning_rate=plan_learning_rate(config, plan),
        clip_norm=config.optim.clip_norm,
        evaluate=partial(evaluate, model, data.test, normalise, len(data.class_names), config.batch.microbatch, world),
        stop_requested=stop_requested,
        initial_weights=initial_weights,
    )


def require_same_network(state: dict[str, torch.Tensor], world: World) -> None:
    shapes = world.all_gather({name: list(tensor.shape) for name, tensor in state.items()})
    for rank, others in enumerate(shapes):
        for name in sorted(shapes[0].keys() | others.keys()):
            if shapes[0].get(name) != others.get(name):
                raise UserError(
                    f"{name} is {shapes[0].get(name)} on rank 0 and {others.get(name)} on rank {rank}; "
                    "all ranks must bring the same network"
                )
