from typing import Any

import pytest
import torch
from torch import nn

from megabatch.models.layers import head_parameters
from megabatch.models.resnet import RESNETS
from megabatch.models.small import small_resnet
from megabatch.optim.groups import decay_by_layer, layers_of, parameter_groups, split_off
from megabatch.optim.optimizers import set_learning_rate


class Block(nn.Module):
    """A block whose shortcut has a BatchNorm that a rule by name would not recognise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.layer_norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.recurrent = nn.RNN(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied_again = self.tied
        self.scale = nn.Parameter(torch.ones(4))
        self.position = nn.Parameter(torch.ones(1, 4))

    def no_weight_decay(self) -> set[str]:
        return {"position"}


def groups_by_name(model: nn.Module) -> dict[str, list[str]]:
    return {group["name"]: group["param_names"] for group in parameter_groups(model, 0.1)}


def test_normalisation_is_found_by_type_and_biases_by_name() -> None:
    groups = groups_by_name(Block())
    assert groups["others"] == ["scale", "position"]
    assert groups["normalisation"] == [
        "downsample.1.weight",
        "downsample.1.bias",
        "layer_norm.weight",
        "layer_norm.bias",
    ]
    assert groups["biases"] == [
        "conv.bias",
        "attention.in_proj_bias",
        "attention.bias_k",
        "attention.bias_v",
        "attention.out_proj.bias",
        "recurrent.bias_ih_l0",
        "recurrent.bias_hh_l0",
    ]
    assert groups["weights"] == [
        "conv.weight",
        "downsample.0.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
        "tied.weight",
    ]


def test_only_weights_decay() -> None:
    decay = {group["name"]: group["weight_decay"] for group in parameter_groups(Block(), 0.1)}
    assert decay == {"weights": 0.1, "biases": 0.0, "normalisation": 0.0, "others": 0.0}


def test_decay_all_changes_only_the_weight_decay() -> None:
    model = Block()
    groups, usual = parameter_groups(model, 0.1, decay_all=True), parameter_groups(model, 0.1)
    assert {group["weight_decay"] for group in groups} == {0.1}
    for group, other in zip(groups, usual, strict=True):
        assert group | {"weight_decay": 0} == other | {"weight_decay": 0}


def test_every_trained_parameter_is_in_exactly_one_group() -> None:
    model = small_resnet(10, 1)
    grouped = [parameter for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert {id(parameter) for parameter in grouped} == {id(parameter) for parameter in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    torch.optim.SGD(parameter_groups(model, 0.1), lr=0.1)  # torch rejects duplicates


def test_head_has_separate_groups_and_a_factor_of_every_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups = split_off(parameter_groups(model, 0.1), ["2.weight", "2.bias"], "head", {"lr_factor": 5.0})
    assert {group["name"]: (group["param_names"], group["weight_decay"]) for group in groups} == {
        "weights": (["0.weight"], 0.1),
        "biases": (["0.bias"], 0.0),
        "normalisation": (["1.weight", "1.bias"], 0.0),
        "head weights": (["2.weight"], 0.1),
        "head biases": (["2.bias"], 0.0),
    }
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for learning_rate in (0.5, 0.0, 2.0):
        set_learning_rate(optimizer, learning_rate)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert {name: rate / 5 if name.startswith("head") else rate for name, rate in rates.items()} == dict.fromkeys(
            rates, learning_rate
        )


def rates(groups: list[dict[str, Any]], factor: str) -> dict[str, tuple[Any, float]]:
    """Return the factor of the learning rate and the decay of each parameter."""
    return {
        name: (pytest.approx(group.get(factor, 1.0)), group["weight_decay"])
        for group in groups
        for name in group["param_names"]
    }


@pytest.mark.usefixtures("torchvision")  # which timm imports
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet50", "convnext_atto"])
def test_layer_decay_is_that_of_timm(name: str) -> None:
    import timm
    from timm.optim import param_groups_layer_decay

    with torch.device("meta"):
        model = timm.create_model(name)
        ours = RESNETS["resnet50"](1000, 3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    skipped: set[str] = getattr(model, "no_weight_decay", set)()
    expected = param_groups_layer_decay(model, 0.1, no_weight_decay_list=skipped, layer_decay=0.7)
    for group in expected:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]

    def by_layer(model: nn.Module) -> dict[str, tuple[float, float]]:
        layers = layers_of(model, head_parameters(model))
        return rates(decay_by_layer(parameter_groups(model, 0.1), layers, 0.7), "lr_factor")

    assert by_layer(model) == rates(expected, "lr_scale")
    if name == "convnext_atto":  # timm's layers of a downsampling are those of the blocks beside it
        return
    type(model).group_matcher, kept = None, type(model).group_matcher
    try:  # by the rule for models without timm's method
        del type(model).group_matcher
        assert by_layer(model) == rates(expected, "lr_scale")
    finally:
        type(model).group_matcher = kept
    if name == "resnet50":
        assert by_layer(ours) == rates(expected, "lr_scale")
