"""Models by name, and a user's own by "package.module:factory"."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from megabatch.errors import UserError, nearest, require_one_of
from megabatch.models.small import small_cnn, small_resnet

MODELS: dict[str, Callable[..., nn.Module]] = {"small_resnet": small_resnet, "small_cnn": small_cnn}


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the factory

    def __post_init__(self) -> None:
        if ":" not in self.name:
            require_one_of("model.name", self.name, MODELS)


def build_model(settings: ModelSettings, seed: int, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """The model with its initial weights, which depend on the seed alone.

    A factory is called with `num_classes`, with `in_channels` and `image_size` if it names them, and with
    the options of the recipe.
    """
    factory = MODELS[settings.name] if settings.name in MODELS else import_factory(settings.name)
    named = inspect.signature(factory).parameters
    offered = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    arguments = {key: value for key, value in offered.items() if key in named or key == "num_classes"}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    known = [name for name in named if name not in offered]
    for option in settings.options:
        if option not in known and not takes_any:
            remedy = f"nearest: model.options.{nearest(option, known)}" if known else "it takes none"
            raise UserError(f"model.options.{option}: {settings.name} has no such option; {remedy}")
    torch.manual_seed(seed)
    model = factory(**arguments | settings.options)
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name={settings.name!r} returned a {type(model).__name__}; it must return an nn.Module")
    return model


def import_factory(name: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"model.name={name!r} cannot be imported ({error}); expected package.module:factory on PYTHONPATH"
        ) from error
    if not callable(factory):
        raise UserError(f"model.name={name!r} is a {type(factory).__name__}; it must be a function or a class")
    return factory  # type: ignore[no-any-return]
