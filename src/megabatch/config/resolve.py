"""What a recipe resolves to for a data set and a number of ranks: its steps, its learning rates, its model."""

from collections.abc import Callable
from typing import Any

import msgspec
from torch import nn

from megabatch.config.schema import RunConfig
from megabatch.data.shapes import DataShape
from megabatch.models.catalog import build_model
from megabatch.optim.schedules import schedule
from megabatch.planning.batch import StepPlan, plan_steps

# What does not change what is computed: sections, and settings.
IRRELEVANT = ("name", "about", "provenance", "run", "checkpoint", "comm.timeout_s", "comm.timeline")


def decisive_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that determine a run, by their dotted names."""
    flattened: dict[str, Any] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, member in value.items():
                add(member, f"{name}.{key}" if name else key)
        else:
            flattened[name] = value

    add(msgspec.to_builtins(config), "")
    return {key: value for key, value in flattened.items() if not {key, key.partition(".")[0]} & set(IRRELEVANT)}


def plan_run(config: RunConfig, shape: DataShape, num_ranks: int) -> StepPlan:
    return plan_steps(config.batch, num_ranks, shape.num_train, config.train.epochs, config.train.evaluate_every)


def plan_learning_rate(config: RunConfig, plan: StepPlan) -> Callable[[int], float]:
    warmup_steps = round(config.schedule.warmup_epochs * plan.num_samples / plan.global_batch)
    return schedule(config.schedule, config.optim.learning_rate, warmup_steps, plan.num_steps)


def make_model(config: RunConfig, shape: DataShape) -> nn.Module:
    return build_model(config.model, config.seed, shape.num_classes, shape.num_channels, config.data.image_size)
