from types import ModuleType

import pytest
import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.models.catalog import MODELS, ModelSettings, build_model
from megabatch.models.layers import freeze, head_of, head_parameters
from megabatch.models.resnet import resnet18


def build(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        settings = ModelSettings(name=name, options=options)
        return build_model(settings, seed=1, num_classes=7, in_channels=3, image_size=64)


def computes_the_logits(model: nn.Module) -> bool:
    head = model.get_submodule(head_of(model))
    with torch.device("meta"):
        return model.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, 7) and getattr(head, "out_features", None) == 7


@pytest.mark.parametrize("name", list(MODELS))
def test_head_of_every_model_computes_the_logits(name: str) -> None:
    assert computes_the_logits(build(name))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "densenet121", "efficientnet_b0", "convnext_tiny"])
def test_head_of_torchvision_models_is_found(torchvision: ModuleType, name: str) -> None:
    assert computes_the_logits(build(f"torchvision.models:{name}"))


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_100", "vit_tiny_patch16_224"])
def test_head_of_timm_models_is_found(torchvision: ModuleType, name: str) -> None:
    options = {"img_size": 64} if name.startswith("vit") else {}
    assert computes_the_logits(build("timm:create_model", model_name=name, **options))


def test_frozen_modules_are_not_trained_and_run_in_evaluation_mode() -> None:
    with torch.device("meta"):
        model = freeze(resnet18(num_classes=7), ["conv1", "bn1", "layer1", "layer2.0"])
    frozen = ("conv1.", "bn1.", "layer1.", "layer2.0.")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(frozen), name
    for name, module in model.named_modules():
        assert module.training != f"{name}.".startswith(frozen), name


def test_head_parameters_are_named_as_in_the_state_dict() -> None:
    assert head_parameters(nn.Linear(2, 3)) == ["weight", "bias"]
    assert head_parameters(nn.Sequential(nn.Linear(2, 3), nn.ReLU())) == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layer9"], r"model.freeze=\['layer9'\]: the model has no module 'layer9'; nearest: layer\d"),
        (["fc.weight"], r"no module 'fc.weight'; nearest: fc"),
        ([""], r"no module ''"),
        (["conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"], r"leaves nothing to train; leave 'fc' out"),
    ],
)
def test_invalid_freeze_is_a_one_line_error(names: list[str], message: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=message):
        freeze(resnet18(num_classes=7), names)
