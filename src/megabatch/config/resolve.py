"""The steps, learning rates and model of a recipe for a given data set and number of ranks."""

from collections.abc import Callable, Collection
from typing import Any

import msgspec
from torch import nn

from megabatch.config.length import shorten_warmup
from megabatch.config.schema import RunConfig
from megabatch.data.settings import AUTO_HELD_OUT, CENTER_CROP
from megabatch.data.sources.shapes import DataShape
from megabatch.errors import UserError
from megabatch.models.catalog import build_model
from megabatch.models.layers import freeze, head_of, head_parameters
from megabatch.optim.groups import (
    LR_FACTOR,
    OPTIMIZER,
    UNTIL,
    decay_by_layer,
    layers_of,
    matching,
    parameter_groups,
    split_off,
)
from megabatch.optim.muon import is_matrix
from megabatch.optim.optimizers import GroupSettings, OptimSettings
from megabatch.optim.schedules import schedule
from megabatch.planning.batch import StepPlan, plan_steps
from megabatch.runs.settings import is_decisive

# The values that "auto" stands for in fingerprints. If auto resolves to another value, the images' fingerprint differs.
BEFORE_AUTO = {"data.center_crop": CENTER_CROP, "data.validation": AUTO_HELD_OUT}


def decisive_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine a run's result, by their dotted names."""
    flattened: dict[str, Any] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, member in value.items():
                add(member, f"{name}.{key}" if name else key)
        else:
            flattened[name] = BEFORE_AUTO[name] if value == "auto" and name in BEFORE_AUTO else value

    add(msgspec.to_builtins(config), "")
    return {key: value for key, value in flattened.items() if is_decisive(key)}


def in_epochs(config: RunConfig, num_samples: int) -> RunConfig:
    """Return the same run with its length in epochs and a warm-up that fits into it."""
    steps, recipe_epochs, warmup = config.train.steps, config.train.epochs, config.schedule.warmup_epochs
    if steps is None:
        return config
    epochs = steps * config.batch.global_batch / num_samples
    if warmup >= epochs and recipe_epochs is None:
        raise UserError(
            f"train.steps={steps} is {epochs:.3g} epochs of {num_samples} samples, not longer than "
            f"schedule.warmup_epochs={warmup:g}; for example schedule.warmup_epochs={epochs / 4:.3g}"
        )
    if warmup >= epochs and recipe_epochs is not None:
        warmup = shorten_warmup(warmup, recipe_epochs, epochs)
    replace = msgspec.structs.replace
    return replace(
        config,
        train=replace(config.train, epochs=epochs, steps=None),
        schedule=replace(config.schedule, warmup_epochs=warmup),
    )


def describe_epochs(config: RunConfig, num_samples: int) -> str:
    """Return, for example, "12 epochs", with the warm-up if it was shortened."""
    resolved = in_epochs(config, num_samples)
    warmup, given = resolved.schedule.warmup_epochs, config.schedule.warmup_epochs
    shortened = f" (warm-up shortened to {warmup:.3g})" if warmup != given else ""
    unit = "epoch" if resolved.train.epochs == 1 else "epochs"
    return f"{resolved.train.epochs:g} {unit}{shortened}"


def plan_run(config: RunConfig, shape: DataShape, num_ranks: int) -> StepPlan:
    epochs = in_epochs(config, shape.num_train).train.epochs
    assert epochs is not None
    return plan_steps(
        config.batch, num_ranks, shape.num_train, epochs, config.train.evaluate_every, num_steps=config.train.steps
    )


def plan_learning_rate(config: RunConfig, plan: StepPlan) -> Callable[[float], float]:
    warmup_epochs = in_epochs(config, plan.num_samples).schedule.warmup_epochs
    warmup_steps = round(warmup_epochs * plan.num_samples / plan.global_batch)
    return schedule(config.schedule, config.optim.learning_rate, warmup_steps, plan.num_steps)


def plan_average(config: RunConfig, plan: StepPlan) -> float | None:
    """Return the factor by which an update of the weights' average decays its past; None without an average."""
    half_life, every = config.train.ema_half_life_epochs, config.train.ema_every_steps
    if not half_life:
        return None
    if every > plan.num_steps:
        raise UserError(
            f"train.ema_every_steps={every} is more than the {plan.num_steps} steps of the run, so the average would "
            f"be the initial weights; nearest: train.ema_every_steps={plan.num_steps}"
        )
    return float(0.5 ** (plan.epochs_after(every) / half_life))


def make_model(config: RunConfig, shape: DataShape) -> nn.Module:
    model = build_model(config.model, config.seed, shape.num_classes, shape.num_channels, config.data.image_size)
    return freeze(model, config.model.freeze or [])


def plan_groups(config: RunConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups, with separate groups for parameters that have their own settings."""
    optim = config.optim
    groups = parameter_groups(model, optim.weight_decay, optim.decay_all)
    head = head_parameters(model)
    if optim.name == "muon":
        groups = split_off(groups, not_for_muon(groups, head), "other", changes(optim, optim.muon.group))
    if optim.layer_decay < 1.0:
        groups = decay_by_layer(groups, layers_of(model, head), optim.layer_decay)
    if optim.head_learning_rate is not None:
        if not any(name in head for group in groups for name in group["param_names"]):
            raise UserError(
                f"optim.head_learning_rate={optim.head_learning_rate:g}: the last layer, {head_of(model)}, is frozen; "
                "remove optim.head_learning_rate or model.freeze"
            )
        groups = split_off(groups, head, "head", {LR_FACTOR: optim.head_learning_rate / optim.learning_rate})
    for group in optim.groups:
        label = ", ".join(group.parameters)
        groups = split_off(groups, matching(group.parameters, groups), label, changes(optim, group))
    return groups


def not_for_muon(groups: list[dict[str, Any]], head: Collection[str]) -> list[str]:
    """Return the parameters that are not matrices, and those of the head: its rows are classes."""
    return [
        name
        for group in groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if name in head or not (group["trust_ratio"] and is_matrix(parameter.shape))
    ]


def changes(optim: OptimSettings, group: GroupSettings) -> dict[str, Any]:
    """Return the settings of a group that differ from those of the other parameters."""
    rate, until = group.learning_rate, group.until
    changed = {LR_FACTOR: None if rate is None else rate / optim.learning_rate, OPTIMIZER: group.optimizer}
    changed |= {"momentum": group.momentum, "weight_decay": group.weight_decay, UNTIL: until if until < 1.0 else None}
    return {key: value for key, value in changed.items() if value is not None}
