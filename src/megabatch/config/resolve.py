"""What a recipe resolves to for a data set and a number of ranks: its steps, its learning rates, its model."""

from collections.abc import Callable
from typing import Any

from torch import nn

from megabatch.config.schema import RunConfig
from megabatch.data.shapes import DataShape
from megabatch.errors import UserError
from megabatch.models.catalog import build_model
from megabatch.models.layers import freeze, head_of, head_parameters
from megabatch.optim.groups import parameter_groups, split_head
from megabatch.optim.schedules import schedule
from megabatch.planning.batch import StepPlan, plan_steps


def plan_run(config: RunConfig, shape: DataShape, num_ranks: int) -> StepPlan:
    return plan_steps(config.batch, num_ranks, shape.num_train, config.train.epochs, config.train.evaluate_every)


def plan_learning_rate(config: RunConfig, plan: StepPlan) -> Callable[[int], float]:
    warmup_steps = round(config.schedule.warmup_epochs * plan.num_samples / plan.global_batch)
    return schedule(config.schedule, config.optim.learning_rate, warmup_steps, plan.num_steps)


def make_model(config: RunConfig, shape: DataShape) -> nn.Module:
    model = build_model(config.model, config.seed, shape.num_classes, shape.num_channels, config.data.image_size)
    return freeze(model, config.model.freeze or [])


def plan_groups(config: RunConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The groups of the model's parameters; those of the head apart if they have a learning rate of their own."""
    optim = config.optim
    groups = parameter_groups(model, optim.weight_decay, optim.decay_all)
    if optim.head_learning_rate is None:
        return groups
    head = head_parameters(model)
    if not any(name in head for group in groups for name in group["param_names"]):
        raise UserError(
            f"optim.head_learning_rate={optim.head_learning_rate:g}: the last layer, {head_of(model)}, is frozen; "
            "leave one of the two out"
        )
    return split_head(groups, head, optim.head_learning_rate / optim.learning_rate)
