"""Models by name, or custom ones as "package.module:factory"."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, Struct, field
from torch import nn

from megabatch.errors import UserError, nearest, require_one_of
from megabatch.models.airbench import airbench94
from megabatch.models.alexnet import alexnet, alexnet_bn, small_alexnet_bn
from megabatch.models.resnet import RESNETS
from megabatch.models.small import shallow_cnn, small_cnn, small_resnet, tiny_cnn
from megabatch.torch_api import is_refused_view, missing_operator
from megabatch.user_code import import_user_code, is_user_code

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_resnet": small_resnet,
    "small_cnn": small_cnn,
    "tiny_cnn": tiny_cnn,
    "shallow_cnn": shallow_cnn,
    "airbench94": airbench94,
    "alexnet": alexnet,
    "alexnet_bn": alexnet_bn,
    "small_alexnet_bn": small_alexnet_bn,
    **RESNETS,
}


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the factory
    # Initial weights: a file, or the folder of a run; by default they depend on the seed.
    weights: Annotated[str, Meta(min_length=1)] | None = None
    freeze: list[str] | None = None  # modules that are not trained
    channels_last: bool | Literal["auto"] = "auto"  # the memory order of images; auto: for the models of MODELS
    compile: bool = False  # use torch.compile for training
    cuda_graphs: bool = False  # for microbatches that are not all-reduced

    def __post_init__(self) -> None:
        if self.compile and self.cuda_graphs:
            raise UserError(
                "model.compile=true and model.cuda_graphs=true: the graph is recorded from the network as it is; "
                "omit one of them"
            )
        if not self.is_user_model:
            require_one_of("model.name", self.name, MODELS)

    @property
    def is_user_model(self) -> bool:
        return is_user_code(self.name)

    @property
    def wants_channels_last(self) -> bool:
        # A quarter faster on CPU, but `x.view(len(x), -1)`, which many models use, does not support it.
        return not self.is_user_model if self.channels_last == "auto" else self.channels_last


def build_model(settings: ModelSettings, seed: int, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return the model with its initial weights, which depend only on the seed.

    A factory is called with `num_classes`, with `in_channels` and `image_size` if it names them, and with
    the options of the recipe.
    """
    factory = import_user_code("model.name", settings.name) if settings.is_user_model else MODELS[settings.name]
    try:
        named = inspect.signature(factory).parameters
    except ValueError:  # built-in types have none
        raise UserError(
            f"model.name={settings.name!r} has no signature to inspect; use a function or a class"
        ) from None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    if "num_classes" not in named and not takes_any:
        raise UserError(f"model.name={settings.name!r} must take num_classes; it takes {', '.join(named) or 'nothing'}")
    offered = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    arguments = {key: value for key, value in offered.items() if key in named or key == "num_classes"}
    known = [name for name in named if name not in offered]
    for option in settings.options:
        if option not in known and not takes_any:
            remedy = f"nearest: model.options.{nearest(option, known)}" if known else "it takes none"
            raise UserError(f"model.options.{option}: {settings.name} has no such option; {remedy}")
    torch.manual_seed(seed)
    with model_errors(settings):
        model = factory(**arguments | settings.options)
    if not isinstance(model, nn.Module):
        raise UserError(f"model.name={settings.name!r} returned a {type(model).__name__}; it must return an nn.Module")
    return model


@contextmanager
def model_errors(settings: ModelSettings, image_shape: Sequence[int] = ()) -> Iterator[None]:
    """Turn errors of built-in models, which settings cause, into UserErrors.  Custom models keep their traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if settings.channels_last is True and is_refused_view(error):
            raise UserError(
                f"model.channels_last=true: {settings.name} takes a view that this memory format does not allow; "
                "write x.flatten(1) or x.reshape(...) instead of x.view(...), or leave model.channels_last out"
            ) from error
        operator = missing_operator(error)
        if operator is not None:
            raise UserError(
                f"model.name={settings.name!r} calls torchvision's operator {operator}, and torchvision's compiled "
                f"extension does not match torch {torch.__version__}; install the torchvision build that matches torch"
            ) from error
        if settings.is_user_model:
            raise
        on = f" on images {list(image_shape)}" if image_shape else ""
        options = f" with model.options={settings.options}" if settings.options else ""
        remedy = "change the size of the images (data.image_size, data.sizes, data.test_image_size) or the model"
        raise UserError(
            f"model.name={settings.name!r}{options} fails{on}: {error}; {remedy if on else 'change model.options'}"
        ) from error


def check_logits(settings: ModelSettings, logits: object, expected: tuple[int, int]) -> None:
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != expected:
        got = list(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        raise UserError(f"model.name={settings.name!r} returned {got}; it must return logits {list(expected)}")


def require_named(settings: ModelSettings, named: str | None, where: str, remedy: str) -> None:
    """Check that the user named the custom code of a model.  Built-in models need not be named.

    The user writes a recipe, which may name any `package.module:factory`.  The folder of a run or the file of a model
    may come from an untrusted source, and could run arbitrary code with torch.hub:load and its options.  So code that
    they name is imported only if the user names it too.
    """
    if settings.is_user_model and settings.name != named:
        options = f" with model.options={settings.options}" if settings.options else ""
        raise UserError(
            f"{where}: its model is Python code, {settings.name}{options}, which would be imported and run; "
            f"if you trust it, add {remedy}"
        )
