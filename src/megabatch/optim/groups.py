"""Parameter groups, which set the weight decay and LARS's trust ratio.

Biases and the gamma and beta of normalisation layers have neither: without their decay AlexNet at batch 64K gains 1.3
points (Jia et al. 2018: 55.8 % with, 57.1 % without).  The rule depends on the module's type and not on names, so that
it also recognises the BatchNorm of a shortcut (`downsample.1.weight`).
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from megabatch.torch_api import NormBase

LR_FACTOR = "lr_factor"  # a group's learning rate divided by that of the run; 1 if the group does not set it
NORMALISATION = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: weights, biases and normalisation layers.

    Args:
        model: The network. Parameters with `requires_grad=False` are omitted.
        weight_decay: The weight decay of the group "weights".
        decay_all: Apply it to "biases" and "normalisation" too; by default their weight decay is 0.

    Returns:
        One dictionary per group that is not empty, with "name", "params", "param_names", "weight_decay" and
        "trust_ratio". The latter is true only for "weights"; LARS reads it, and torch's optimizers ignore it.

    Examples:
        >>> groups = parameter_groups(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), weight_decay=5e-5)
        >>> [(group["name"], group["param_names"], group["weight_decay"]) for group in groups]
        [('weights', ['0.weight'], 5e-05), ('biases', ['0.bias'], 0.0), ('normalisation', ['1.weight', '1.bias'], 0.0)]
    """
    names: dict[str, list[str]] = {"weights": [], "biases": [], "normalisation": []}
    kinds = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, NORMALISATION):
                kinds[parameter] = "normalisation"
            else:
                kinds[parameter] = "biases" if "bias" in name.split("_") else "weights"  # also in_proj_bias, bias_ih_l0
    parameters = dict(model.named_parameters())  # each once, even if modules share it
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            names[kinds[parameter]].append(name)
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


def split_head(groups: list[dict[str, Any]], head: Collection[str], factor: float) -> list[dict[str, Any]]:
    """Move the parameters named in `head` to separate groups.

    Their learning rate is `factor` times that of the others at every step: see `set_learning_rate`.
    """
    others = [members_of(group, lambda name: name not in head) for group in groups]
    own = [
        members_of(group, lambda name: name in head) | {"name": f"head {group['name']}", LR_FACTOR: factor}
        for group in groups
    ]
    return [group for group in others + own if group["params"]]


def members_of(group: dict[str, Any], belongs: Callable[[str], bool]) -> dict[str, Any]:
    members = [pair for pair in zip(group["param_names"], group["params"], strict=True) if belongs(pair[0])]
    return group | {"param_names": [name for name, _ in members], "params": [parameter for _, parameter in members]}
