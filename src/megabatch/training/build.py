"""Assembly of a run's parts from a recipe.  Modules below this one do not see the whole config."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import nn

from megabatch.config.resolve import make_model, plan_average, plan_groups, plan_learning_rate, plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.pipeline.batches import TrainingImages
from megabatch.data.pipeline.images import DataSet, ImageSet, PixelStatistics
from megabatch.data.pipeline.mix import Mixing
from megabatch.data.pipeline.normalise import Normalise, evenly_spaced, measure_pixels, read_batches
from megabatch.data.pipeline.policies import require_colours
from megabatch.errors import UserError
from megabatch.models.airbench import Whitening
from megabatch.models.layers import freeze
from megabatch.models.loss import SummedLoss, class_weights, summed_loss
from megabatch.models.weights import match, read_weights, require_finite
from megabatch.optim.optimizers import MakeOptimizer, make_optimizer, make_user_optimizer
from megabatch.precision.cast import place_model
from megabatch.precision.loss_scale import choose_loss_scale
from megabatch.ranks.world import World
from megabatch.runs.files import CHECKPOINTS
from megabatch.training.batch_norm import RunningStatistics
from megabatch.training.checkpoint.card import make_card, pixels_of
from megabatch.training.checkpoint.weights import find_weights
from megabatch.training.ema import WeightAverage
from megabatch.training.evaluate import MistakeCounter, evaluate, evaluate_labels, require_evaluable
from megabatch.training.parts import Comparison, Parts, never

WHITENED_SAMPLES = 5_000  # images whose patches a whitening layer is measured on


class InitialWeights(Struct, frozen=True):
    """The result of reading `model.weights` on rank 0, as broadcast to all ranks."""

    problem: str | None = None
    lines: list[str] = []  # printed at the start
    pixels: PixelStatistics | None = None  # of the megabatch run that trained them


def load_initial_weights(model: nn.Module, source: str, world: World) -> InitialWeights:
    """Load the weights that fit into the model of every rank.  All ranks call it, and rank 0 reads the file."""
    found, tensors = InitialWeights(), {}
    if world.rank == 0:
        try:
            path = Path(source)
            report = match(model, read_weights(path))
            require_finite(report.tensors)
            lines = report.lines(str(path) if path.is_dir() else path.name)
            found, tensors = InitialWeights(None, lines, pixels_of_run(path)), report.tensors
        except UserError as error:
            found = InitialWeights(f"model.weights={source!r}: {error}")
    found = msgspec.json.decode(world.broadcast_text(msgspec.json.encode(found).decode()), type=InitialWeights)
    if found.problem:
        raise UserError(found.problem)
    model.load_state_dict(world.broadcast_tensors(tensors), strict=False)
    return found


def pixels_of_run(path: Path) -> PixelStatistics | None:
    """Return the pixel statistics of the run that wrote the weights; None if megabatch did not write them."""
    try:
        checkpoint = path.name if path.parent.name == CHECKPOINTS else None
        return pixels_of(find_weights(path.parents[1] if checkpoint else path, checkpoint).card)
    except (UserError, OSError):
        return None


class Overrides(NamedTuple):
    """Objects from the caller that replace those of the recipe."""

    network: nn.Module | None = None  # rank 0's weights are broadcast
    loss: SummedLoss | None = None
    optimizer: MakeOptimizer | None = None


NO_OVERRIDES = Overrides()


def assemble(
    config: RunConfig,
    data: DataSet,
    world: World,
    overrides: Overrides = NO_OVERRIDES,
    stop_requested: Callable[[], bool] = never,
    pixels: PixelStatistics | None = None,  # as measured when the run started; None: a new run
) -> Parts:
    require_colours(config.data.augment, data.num_channels)
    plan = plan_run(config, data.shape, world.num_ranks)
    formats = config.precision.formats
    network = overrides.network
    model = make_model(config, data.shape) if network is None else freeze(network, config.model.freeze or [])
    initial_weights = InitialWeights()
    if config.model.weights:
        model.to(formats.update)  # fp64 would be rounded
        initial_weights = load_initial_weights(model, config.model.weights, world)
    if initial_weights.pixels and len(initial_weights.pixels.mean) == data.num_channels:
        pixels = pixels or initial_weights.pixels
    pixels = pixels or world.from_rank_0(partial(measure_pixels, data.train), PixelStatistics)
    if not config.model.weights:
        fit_whitening(model, data.train, pixels, world)
    master_weights = place_model(model, config.precision, world.device, config.model.wants_channels_last)
    if not master_weights.weights:
        raise UserError(
            f"model.name={config.model.name!r} has no trainable parameters; set requires_grad of some to True"
        )
    # The recipe's networks follow from the seed on every rank.  DDP would broadcast rounded weights.
    if network is not None:
        require_same_network(master_weights.state_dict(), world)
        master_weights.load_state_dict(world.broadcast_tensors(master_weights.state_dict()))
    is_rounded_to_fp16 = formats.has_small_range or config.comm.dtype == "fp16"
    loss_scale = choose_loss_scale(config.precision, is_rounded_to_fp16, plan.global_batch, world.device)
    groups = master_weights.param_groups(plan_groups(config, model))
    make = partial(make_user_optimizer, overrides.optimizer) if overrides.optimizer else make_optimizer
    optimizer = make(groups, config.optim)
    is_custom = overrides.optimizer or config.optim.is_user_optimizer
    normalise = Normalise(pixels, world.device, formats.model, config.model.wants_channels_last)
    num_classes = len(data.class_names)
    weights = class_weights(config.loss, data.class_names, data.count_classes(), len(data.train))
    loss_dtype = torch.promote_types(formats.model, torch.float32)
    weight_tensor = torch.tensor(weights, dtype=loss_dtype, device=world.device) if weights else None
    statistics = RunningStatistics(model, plan.accumulation)
    average = WeightAverage(model, master_weights, statistics, plan_average(config, plan), config.train.ema_every_steps)
    sets = data.label_sets
    mistakes = MistakeCounter(data.test, num_classes, config.train.examples, world)
    if sets is None:
        evaluation = partial(evaluate, model, data.test, normalise, num_classes, mistakes=mistakes)
    else:
        require_evaluable(data.test, sets)
        evaluation = partial(evaluate_labels, model, data.test, sets, normalise)
    return Parts(
        world=world,
        seed=config.seed,
        plan=plan,
        data=data,
        data_fingerprint=data.fingerprint(),
        card=make_card(config, data, pixels),
        images=TrainingImages(data.train, config.data, config.seed, plan, world.device, pixels),
        normalise=normalise,
        mixing=Mixing(config.data.augment, config.seed, world.device, formats.model),
        network=model,
        update_dtype=formats.update,
        summed_loss=overrides.loss or partial(summed_loss, config.loss, weights=weight_tensor),
        class_weights=weights,
        label_sets=None if sets is None else sets.to(world.device, loss_dtype),
        statistics=statistics,
        master_weights=master_weights,
        loss_scale=loss_scale,
        optimizer=optimizer,
        optimizer_name=type(optimizer).__name__ if is_custom else config.optim.name,
        average=average,
        learning_rate=plan_learning_rate(config, plan),
        clip_norm=config.optim.clip_norm,
        evaluate=partial(
            evaluation,
            batch_size=config.batch.microbatch,
            world=world,
            views=config.data.test_views,
            average=average if average.is_on else None,
        ),
        mistakes=mistakes,
        comparison=Comparison(config.run.compare_every),
        noise_every=config.train.noise_every,
        stop_requested=stop_requested,
        initial_weights=tuple(initial_weights.lines),
    )


@torch.no_grad()
def fit_whitening(model: nn.Module, images: ImageSet, pixels: PixelStatistics, world: World) -> None:
    """Set the filters of whitening layers for the training images, as measured on rank 0."""
    for layer in model.modules():
        if isinstance(layer, Whitening):
            fit = partial(whitening_filters, layer, images, pixels)
            layer.weight.copy_(torch.tensor(world.from_rank_0(fit, list[float])).view(layer.weight.shape))


def whitening_filters(layer: Whitening, images: ImageSet, pixels: PixelStatistics) -> list[float]:
    batches = read_batches(images, evenly_spaced(images, WHITENED_SAMPLES))
    filters = layer.filters_for(batches, pixels.mean, pixels.deviation)
    return filters.flatten().tolist()


def require_same_network(state: dict[str, torch.Tensor], world: World) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in sorted(state.items())}
    difference = world.first_difference(json.dumps(shapes))
    if difference is None:
        return
    first, other = json.loads(difference.of_rank_0), json.loads(difference.of_rank)
    name = next(name for name in sorted(first | other) if first.get(name) != other.get(name))
    raise UserError(
        f"{name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {difference.rank}; "
        "all ranks must pass the same network"
    )
