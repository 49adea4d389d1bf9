"""From a recipe to the parts of a run.  Nothing below here sees the whole config."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from megabatch.comm.gradients import distribute
from megabatch.comm.world import World
from megabatch.config import RunConfig
from megabatch.data.batches import Normalise, TrainingImages
from megabatch.data.sources import DataSet
from megabatch.models.catalog import build_model
from megabatch.models.loss import summed_loss
from megabatch.optim.groups import parameter_groups
from megabatch.optim.optimizers import OPTIMIZERS
from megabatch.optim.schedules import schedule
from megabatch.planning.batch import StepPlan, plan_steps
from megabatch.train.batch_norm import RunningStatistics
from megabatch.train.evaluate import evaluate
from megabatch.train.exchange import Exchange
from megabatch.train.trainer import Training


def never() -> bool:
    return False


def assemble(config: RunConfig, data: DataSet, world: World, stop_requested: Callable[[], bool] = never) -> Training:
    plan = plan_run(config, data, world.num_ranks)
    dtype = config.precision.dtype
    model = make_model(config, data).to(world.device, dtype)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    statistics = RunningStatistics(model, plan.accumulation)
    normalise = Normalise(data.train, world.device, dtype)
    return Training(
        rank=world.rank,
        seed=config.seed,
        plan=plan,
        images=TrainingImages(data.train, config.data, config.seed, plan),
        normalise=normalise,
        model=distribute(model, world),
        summed_loss=partial(summed_loss, config.loss),
        statistics=statistics,
        exchange=Exchange(world, statistics, dtype),
        optimizer=OPTIMIZERS[config.optim.name](parameter_groups(model, config.optim.weight_decay), config.optim),
        learning_rate=plan_learning_rate(config, plan),
        clip_norm=config.optim.clip_norm,
        evaluate=partial(evaluate, model, data.test, normalise, len(data.class_names), config.batch.microbatch, world),
        stop_requested=stop_requested,
    )


def plan_run(config: RunConfig, data: DataSet, num_ranks: int) -> StepPlan:
    return plan_steps(config.batch, num_ranks, len(data.train), config.train.epochs)


def plan_learning_rate(config: RunConfig, plan: StepPlan) -> Callable[[int], float]:
    warmup_steps = round(config.schedule.warmup_epochs * plan.num_samples / plan.global_batch)
    return schedule(config.schedule, config.optim.learning_rate, warmup_steps, plan.num_steps)


def make_model(config: RunConfig, data: DataSet) -> nn.Module:
    return build_model(config.model, config.seed, len(data.class_names), data.num_channels, config.data.image_size)
