"""From a recipe to the parts of a run.  Nothing below here sees the whole config."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megabatch.comm.hook import distribute
from megabatch.config.resolve import make_model, plan_learning_rate, plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.batches import Normalise, TrainingImages
from megabatch.data.images import DataSet
from megabatch.errors import UserError
from megabatch.models.loss import summed_loss
from megabatch.optim.groups import parameter_groups
from megabatch.optim.optimizers import OPTIMIZERS
from megabatch.planning.tuning import Tuning
from megabatch.precision.loss_scale import choose_loss_scale
from megabatch.precision.masters import Masters
from megabatch.precision.policy import check_device
from megabatch.ranks.world import World
from megabatch.train.batch_norm import RunningStatistics
from megabatch.train.evaluate import evaluate
from megabatch.train.loop import Training
from megabatch.train.step_metrics import Exchange
from megabatch.train.warm_up import Trial


def never() -> bool:
    return False


def assemble(
    config: RunConfig,
    data: DataSet,
    world: World,
    stop_requested: Callable[[], bool] = never,
    model: nn.Module | None = None,
    stored: Tuning | None = None,
) -> Training:
    """The parts of a run: with the recipe's model, unless one is given, and sums as chosen before, if they were."""
    plan = plan_run(config, data.shape, world.num_ranks)
    formats = config.precision.formats
    torch.backends.cudnn.benchmark = not config.run.deterministic  # which nothing on a CPU looks at
    torch.backends.cudnn.deterministic = config.run.deterministic
    is_given = model is not None
    if model is None:
        model = make_model(config, data.shape)
    masters = place_model(model, config, world.device)
    if not masters.weights:
        raise UserError(f"model.name={config.model.name!r} has nothing to train; set requires_grad of some parameters")
    if is_given:  # ours are the same everywhere, as they follow from the seed; DDP would share rounded ones
        require_same_network(masters.state(), world)
        masters.load_state(world.share_tensors(masters.state()))
    loss_scale = choose_loss_scale(
        config.precision, formats.has_small_range or config.comm.wire == "fp16", plan.global_batch
    )
    statistics = RunningStatistics(model, plan.accumulation, may_skip=loss_scale.is_on)
    normalise = Normalise(data.train, world.device, formats.model, config.model.wants_channels_last)
    images = TrainingImages(data.train, config.data, config.seed, plan, world.device)
    first_images, first_labels = images.microbatch(0, plan.microbatches_of(world.rank)[0])
    trial = Trial(
        settings=config.model,
        images=first_images,
        labels=first_labels,
        num_classes=len(data.class_names),
        normalise=normalise,
        summed_loss=partial(summed_loss, config.loss),
    )
    distributed, gradients = distribute(model, world, config.comm, trial.record(model, world), stored)
    trial.run(distributed)
    groups = masters.of(parameter_groups(model, config.optim.weight_decay, config.optim.decay_all))
    return Training(
        rank=world.rank,
        seed=config.seed,
        plan=plan,
        data=data,
        data_fingerprint=data.fingerprint(),
        images=images,
        normalise=normalise,
        model=distributed,
        summed_loss=trial.summed_loss,
        statistics=statistics,
        exchange=Exchange(gradients, statistics, world, formats.update),
        gradients=gradients,
        masters=masters,
        loss_scale=loss_scale,
        optimizer=OPTIMIZERS[config.optim.name](groups, config.optim),
        learning_rate=plan_learning_rate(config, plan),
        clip_norm=config.optim.clip_norm,
        evaluate=partial(evaluate, model, data.test, normalise, len(data.class_names), config.batch.microbatch, world),
        stop_requested=stop_requested,
    )


def place_model(model: nn.Module, config: RunConfig, device: torch.device) -> Masters:
    """Puts the model where and how it will compute."""
    formats = config.precision.formats
    check_device(config.precision, device)
    model.to(device, formats.update)
    if config.model.wants_channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Masters(model, formats, device)


def require_same_network(state: dict[str, torch.Tensor], world: World) -> None:
    shapes = world.collect({name: list(tensor.shape) for name, tensor in state.items()})
    for rank, others in enumerate(shapes):
        for name in sorted(shapes[0].keys() | others.keys()):
            if shapes[0].get(name) != others.get(name):
                raise UserError(
                    f"{name} is {shapes[0].get(name)} on rank 0 and {others.get(name)} on rank {rank}; "
                    "all ranks must bring the same network"
                )
