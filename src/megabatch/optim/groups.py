"""Which parameters decay, and which have LARS's trust ratio.

Biases and the gamma and beta of normalisation layers have neither: without their decay AlexNet at batch 64K gains 1.3
points (Jia et al. 2018: 55.8 % with, 57.1 % without).  The rule asks for the module's type, not for names, so that the
BatchNorm of a shortcut (`downsample.1.weight`) is recognised too.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from megabatch.torch_api import NormBase

LR_FACTOR = "lr_factor"  # of a group, to the learning rate of the run; 1 where there is none
NORMALISATION = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: "weights" decay, "biases" and "normalisation" only if `decay_all` asks for it.

    "trust_ratio" is for LARS, and true of weights alone; the others of torch leave it alone.
    """
    names: dict[str, list[str]] = {"weights": [], "biases": [], "normalisation": []}
    kinds = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, NORMALISATION):
                kinds[parameter] = "normalisation"
            else:
                kinds[parameter] = "biases" if "bias" in name.split("_") else "weights"  # also in_proj_bias, bias_ih_l0
    parameters = dict(model.named_parameters())  # each once, however often it is shared
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
    """The groups with the parameters named in `head` in groups of their own, whose learning rate is `factor` times
    that of the others at every step: see `set_learning_rate`.
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
