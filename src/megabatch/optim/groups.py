"""Parameter groups, which set the weight decay and LARS's trust ratio.

Biases and the gamma and beta of normalisation layers have neither: without their decay AlexNet at batch 64K gains 1.3
points (Jia et al. 2018: 55.8 % with, 57.1 % without).  The rule depends on the module's type and not on names, so that
it also recognises the BatchNorm of a shortcut (`downsample.1.weight`).
"""

import importlib
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from megabatch.errors import UserError, nearest
from megabatch.torch_api import NormBase

LR_FACTOR = "lr_factor"  # a group's learning rate divided by that of the run; 1 if the group does not set it
OPTIMIZER = "optimizer"  # the name of a group's optimizer, if it is not that of the run
UNTIL = "until"  # the share of the run in which a group is trained, if it is not all of it
CONTAINERS = (nn.Sequential, nn.ModuleList)
NORMALISATION = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: weights, biases, normalisation layers and others.

    "others" are further vectors, such as the scale of a layer, and parameters that the model's `no_weight_decay()`
    names, such as timm's position embeddings.

    Args:
        model: The network. Parameters with `requires_grad=False` are omitted.
        weight_decay: The weight decay of the group "weights".
        decay_all: Apply it to the other groups too; by default their weight decay is 0.

    Returns:
        One dictionary per group that is not empty, with "name", "params", "param_names", "weight_decay" and
        "trust_ratio". The latter is true only for "weights"; LARS reads it, and torch's optimizers ignore it.

    Examples:
        >>> groups = parameter_groups(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), weight_decay=5e-5)
        >>> [(group["name"], group["param_names"], group["weight_decay"]) for group in groups]
        [('weights', ['0.weight'], 5e-05), ('biases', ['0.bias'], 0.0), ('normalisation', ['1.weight', '1.bias'], 0.0)]
    """
    names: dict[str, list[str]] = {"weights": [], "biases": [], "normalisation": [], "others": []}
    kinds = {}
    without_decay: Any = getattr(model, "no_weight_decay", tuple)  # timm's convention
    excluded = set(without_decay())
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, NORMALISATION):
                kinds[parameter] = "normalisation"
            else:
                is_bias = "bias" in name.split("_")  # also in_proj_bias, bias_ih_l0
                kinds[parameter] = "biases" if is_bias else "weights" if parameter.dim() > 1 else "others"
    parameters = dict(model.named_parameters())  # each once, even if modules share it
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            names["others" if name in excluded else kinds[parameter]].append(name)
    return [
        {
            "name": kind,
            "params": [parameters[name] for name in members],
            "param_names": members,
            "weight_decay": weight_decay if decay_all or kind == "weights" else 0.0,
            "trust_ratio": kind == "weights",
        }
        for kind, members in names.items()
        if members
    ]


def split_off(
    groups: list[dict[str, Any]], members: Collection[str], label: str, changes: dict[str, Any]
) -> list[dict[str, Any]]:
    """Move the parameters named in `members` to separate groups with other settings."""
    others = [members_of(group, lambda name: name not in members) for group in groups]
    moved = [
        members_of(group, lambda name: name in members) | {"name": f"{label} {group['name']}"} | changes
        for group in groups
    ]
    return [group for group in others + moved if group["params"]]


def members_of(group: dict[str, Any], belongs: Callable[[str], bool]) -> dict[str, Any]:
    members = [pair for pair in zip(group["param_names"], group["params"], strict=True) if belongs(pair[0])]
    return group | {"param_names": [name for name, _ in members], "params": [parameter for _, parameter in members]}


def matching(patterns: Collection[str], groups: list[dict[str, Any]]) -> list[str]:
    """Return the parameters that a pattern names, in which * stands for any text."""
    names = [name for group in groups for name in group["param_names"]]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"optim.groups: no parameter matches {pattern!r}; nearest: {nearest(pattern, names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def decay_by_layer(groups: list[dict[str, Any]], layers: dict[str, int], decay: float) -> list[dict[str, Any]]:
    """Multiply the learning rate of each layer by `decay` once per layer above it."""
    top = max(layers.values())
    decayed = [members_of(group, lambda name: layers[name] == top) for group in groups]
    for layer in range(top):
        members = {name for name, place in layers.items() if place == layer}
        for group in groups:
            factor = group.get(LR_FACTOR, 1.0) * decay ** (top - layer)
            changes = {"name": f"layer {layer} {group['name']}", LR_FACTOR: factor}
            decayed.append(members_of(group, members.__contains__) | changes)
    return [group for group in decayed if group["params"]]


def layers_of(model: nn.Module, head: Collection[str]) -> dict[str, int]:
    """Return the layer of each parameter, from 0 for the stem.

    timm's models state their layers.  Otherwise a layer is a child of an nn.Sequential or nn.ModuleList that is not
    itself part of a layer, such as the blocks of a ResNet or of a vision transformer.  Parameters before the first
    layer are the stem, those after it belong to the layer below them, and the head is above all.  For timm's ResNets
    and vision transformers this is the same.
    """
    if hasattr(model, "group_matcher"):
        matcher: Any = model.group_matcher
        group_parameters = importlib.import_module("timm.models").group_parameters
        found: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return found
    layers: dict[str, int] = {}
    add_layers(model, "", 0, layers)
    top = 1 + max((layer for name, layer in layers.items() if name not in head), default=-1)
    return layers | dict.fromkeys(head, top)


def add_layers(module: nn.Module, prefix: str, layer: int, layers: dict[str, int]) -> int:
    """Add the parameters of a module that has layers, and of those that follow. Return the last layer."""
    layers |= {f"{prefix}{name}": layer for name, _ in module.named_parameters(recurse=False)}
    for name, child in module.named_children():
        is_layer = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS)
        if not is_layer and any(isinstance(part, CONTAINERS) for part in child.modules()):
            layer = add_layers(child, f"{prefix}{name}.", layer, layers)
            continue
        members = {f"{prefix}{name}.{inner}" for inner, _ in child.named_parameters()}
        layer += is_layer and bool(members)
        layers |= dict.fromkeys(members, layer)
    return layer
