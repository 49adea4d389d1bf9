from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.models.resnet import RESNETS, Basic, Block, Bottleneck, resnet18, resnet50
from megabatch.optim.groups import parameter_groups

PUBLISHED_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def in_use(model: nn.Module) -> nn.Module:
    """Return the model in float64, with BatchNorms that change every value."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor)
    return model.double()


def test_models_have_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        models = {name: resnet(num_classes=1000) for name, resnet in RESNETS.items()}
    counts = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    assert counts == PUBLISHED_PARAMETERS


def test_names_and_shapes_are_those_of_torchvision() -> None:
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


def test_bottleneck_strides_in_its_3x3_convolution() -> None:
    with torch.device("meta"):
        block = Bottleneck(8, 4, stride=2)
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_exchanged_weights_compute_the_same_as_in_torchvision(torchvision: ModuleType, name: str) -> None:
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
    for buffer, their_buffer in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(buffer, their_buffer, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_seed_gives_the_same_weights_as_in_torchvision(torchvision: ModuleType, name: str) -> None:
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
    assert len(blocks) == (8 if resnet is resnet18 else 16)
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


def blur_as_timm(model: nn.Module, timm: ModuleType, pools: bool) -> nn.Module:
    """Put timm's BlurPool2d before strided convolutions of at least 16 channels, and into the max-pool."""
    for name, module in list(model.named_modules()):
        parent, _, place = name.rpartition(".")
        replaced = None
        if isinstance(module, nn.Conv2d) and module.stride[0] > 1 and module.in_channels >= 16:
            replaced = nn.Sequential(timm.BlurPool2d(module.in_channels, stride=1, pad_mode="constant"), module)
        elif pools and isinstance(module, nn.MaxPool2d):
            blurred = timm.BlurPool2d(64, stride=2, pad_mode="constant")
            replaced = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), blurred)
        if replaced is not None:
            setattr(model.get_submodule(parent), place, replaced)
    return model


@pytest.mark.parametrize(("resnet", "blur_pool"), [("resnet18", "all"), ("resnet50", "convolutions")])
def test_a_blurred_resnet_is_torchvisions_with_timms_blur(torchvision: ModuleType, resnet: str, blur_pool: str) -> None:
    import timm.layers as timm

    ours = in_use(RESNETS[resnet](num_classes=5, blur_pool=blur_pool)).train()
    theirs = getattr(torchvision.models, resnet)(num_classes=5).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    theirs = blur_as_timm(theirs, timm, pools=blur_pool == "all").double()
    assert sum(isinstance(module, timm.BlurPool2d) for module in theirs.modules()) == 6 + (blur_pool == "all")
    images = torch.randn(2, 3, 41, 41, dtype=torch.float64)  # odd sides on the way
    logits = ours(images), theirs(images)
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)
    for each in logits:
        each.square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("torchvision")  # which timm imports
def test_stochastic_depth_is_timms_drop_path() -> None:
    import timm.layers as timm

    model = resnet50(num_classes=2, stochastic_depth=0.2)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    rates = timm.drop.calculate_drop_path_rates(0.2, 16)
    assert [block.drop_share for block in blocks] == pytest.approx(rates)
    plain = Basic(4, 4, stride=1).double()
    dropping = Basic(4, 4, stride=1).double()
    dropping.load_state_dict(plain.state_dict())
    dropping.drop_share = 0.5
    x = torch.randn(64, 4, 6, 6, dtype=torch.float64)
    branch = plain.bn2(plain.conv2(torch.relu(plain.bn1(plain.conv1(x)))))
    torch.manual_seed(3)
    expected = torch.relu(timm.DropPath(0.5).train()(branch) + x)
    torch.manual_seed(3)
    torch.testing.assert_close(dropping(x), expected)
    skips = [torch.equal(out, torch.relu(image)) for out, image in zip(expected, x, strict=True)]
    assert 15 < sum(skips) < 49
    assert torch.equal(dropping.eval()(x), plain.eval()(x))


def test_initial_weights_of_published_code() -> None:
    mlperf, composer = (resnet50(1000, zero_gamma=False, init=init) for init in ("mlperf", "composer"))
    for name, model in (("mlperf", mlperf), ("composer", composer)):
        for conv in (module for module in model.modules() if isinstance(module, nn.Conv2d)):
            fan_in = conv.weight[0].numel()
            assert conv.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.05), name
    assert mlperf.fc.weight.std().item() == pytest.approx(0.01, rel=0.01) and not mlperf.fc.bias.any()
    assert composer.fc.weight.std().item() == pytest.approx((2 / 2048) ** 0.5, rel=0.01)
    gammas = [
        torch.cat([module.weight for module in model.modules() if isinstance(module, nn.BatchNorm2d)])
        for model in (mlperf, composer)
    ]
    assert (gammas[0] == 1).all()
    assert gammas[1].min() >= 0 and gammas[1].max() < 1 and gammas[1].mean().item() == pytest.approx(0.5, abs=0.02)


def test_the_prior_bias_gives_each_class_its_share() -> None:
    shares = torch.sigmoid(resnet18(num_classes=1000, prior_bias=True).fc.bias)
    torch.testing.assert_close(shares, torch.full((1000,), 1 / 1001))  # the odds are 1 to 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"init": "mlprf"},
            r"model.options.init='mlprf' is not one of torchvision, mlperf, composer; nearest: .*mlperf",
        ),
        ({"blur_pool": "convs"}, r"model.options.blur_pool='convs' is not one of none, convolutions, all"),
        ({"stochastic_depth": 1.0}, r"model.options.stochastic_depth=1.0: .*for example"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resnet18(num_classes=2, **options)


def test_the_small_stem_keeps_the_resolution_of_small_images() -> None:
    images = torch.zeros(2, 3, 32, 32)
    sides = {}
    for stem in ("imagenet", "small"):
        network = RESNETS["resnet18"](num_classes=5, stem=stem)
        sides[stem] = network.layer1(network.maxpool(network.conv1(images))).shape[2]
        assert network(images).shape == (2, 5)
    assert sides == {"imagenet": 8, "small": 32} and network.conv1.weight.shape == (64, 3, 3, 3)
