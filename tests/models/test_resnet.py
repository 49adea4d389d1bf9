from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from megabatch.models.resnet import RESNETS, Basic, Bottleneck, resnet18, resnet50
from megabatch.optim.groups import parameter_groups

PUBLISHED_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def in_use(model: nn.Module) -> nn.Module:
    """The model in float64, with BatchNorms that leave nothing as it is."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor)
    return model.double()


def test_parameters_are_as_many_as_published() -> None:
    with torch.device("meta"):
        models = {name: resnet(num_classes=1000) for name, resnet in RESNETS.items()}
    counts = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    assert counts == PUBLISHED_PARAMETERS


def test_names_and_shapes_are_torchvisions() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in resnet50(num_classes=7).state_dict().items()}
    assert len(shapes) == 320
    expected = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.weight": (256,),
        "layer2.0.conv1.weight": (128, 256, 1, 1),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer2.0.conv3.weight": (512, 128, 1, 1),
        "layer4.2.bn3.num_batches_tracked": (),
        "fc.weight": (7, 2048),
        "fc.bias": (7,),
    }
    assert {name: shapes.get(name) for name in expected} == expected


def test_a_bottleneck_strides_in_its_3x3_convolution() -> None:
    with torch.device("meta"):
        block = Bottleneck(8, 4, stride=2)
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_weights_pass_to_torchvision_and_back_and_do_the_same(torchvision: ModuleType, name: str) -> None:
    images = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    ours = in_use(RESNETS[name](num_classes=5))
    theirs = getattr(torchvision.models, name)(num_classes=5).double()
    back = RESNETS[name](num_classes=5).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    back.load_state_dict(theirs.state_dict(), strict=True)
    for mode in (False, True):
        logits = [model.train(mode)(images) for model in (ours, theirs, back)]
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)
        assert torch.equal(logits[0], logits[2])
    logits[0].square().sum().backward()
    logits[1].square().sum().backward()
    for (key, mine), (their_key, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert key == their_key
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-8)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_seed_gives_the_weights_that_it_gives_torchvision(torchvision: ModuleType, name: str) -> None:
    torch.manual_seed(3)
    ours = RESNETS[name](num_classes=5).state_dict()
    torch.manual_seed(3)
    theirs = getattr(torchvision.models, name)(num_classes=5, zero_init_residual=True).state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("resnet", [resnet18, resnet50])
@pytest.mark.parametrize("zero_gamma", [True, False])
def test_with_zero_gamma_every_block_starts_as_its_shortcut(resnet: Callable[..., nn.Module], zero_gamma: bool) -> None:
    model = resnet(num_classes=2, zero_gamma=zero_gamma)
    blocks = [module for module in model.modules() if isinstance(module, Basic | Bottleneck)]
    assert len(blocks) == {resnet18: 8, resnet50: 16}[resnet]
    for block in blocks:
        x = torch.randn(2, block.conv1.in_channels, 4, 4)
        assert torch.equal(block(x), torch.relu(block.downsample(x))) == zero_gamma


@pytest.mark.parametrize("zero_gamma", [True, False])
def test_every_parameter_gets_a_gradient(zero_gamma: bool) -> None:
    model = resnet50(num_classes=5, in_channels=1, zero_gamma=zero_gamma)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(2, 1, 64, 64).to(memory_format=torch.channels_last)
    nn.functional.cross_entropy(model(images), torch.tensor([1, 3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert zero_gamma or parameter.grad.any(), name


def test_no_gamma_or_beta_decays() -> None:
    with torch.device("meta"):
        model = resnet50(num_classes=5)
    groups = {group["name"]: group["param_names"] for group in parameter_groups(model, weight_decay=0.1)}
    expected = [name for name, _ in model.named_parameters() if "bn" in name or "downsample.1." in name]
    assert groups["normalisation"] == expected
    assert len(expected) == 2 * (1 + 16 * 3 + 4)
    assert groups["biases"] == ["fc.bias"]
