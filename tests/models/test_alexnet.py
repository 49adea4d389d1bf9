from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megabatch.models.alexnet import FULL, SMALL, alexnet, alexnet_bn, small_alexnet_bn
from megabatch.optim.groups import parameter_groups

PUBLISHED_PARAMETERS = {
    "conv1": 34_944,
    "conv2": 307_456,
    "conv3": 885_120,
    "conv4": 663_936,
    "conv5": 442_624,
    "fc6": 37_752_832,
    "fc7": 16_781_312,
    "fc8": 4_097_000,
}
NORM_CHANNELS = {"norm1": 96, "norm2": 256, "norm3": 384, "norm4": 384, "norm5": 256}


@pytest.fixture(scope="module", params=[alexnet, alexnet_bn])
def grey(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    """A network for grey images, with weights.  It takes half a second to create, and 250 MB."""
    torch.manual_seed(1)
    yield request.param(num_classes=10, in_channels=1)


def parameters_by_layer(model: nn.Module) -> dict[str, int]:
    counts = {name: sum(p.numel() for p in layer.parameters()) for name, layer in model.named_children()}
    return {name: count for name, count in counts.items() if count}


def test_alexnet_has_the_parameters_of_caffe() -> None:
    with torch.device("meta"):
        counts = parameters_by_layer(alexnet(num_classes=1000))
    assert counts == PUBLISHED_PARAMETERS
    assert sum(counts.values()) == 60_965_224


def test_alexnet_bn_adds_gamma_and_beta_of_each_norm() -> None:
    with torch.device("meta"):
        counts = parameters_by_layer(alexnet_bn(num_classes=1000))
        without = parameters_by_layer(alexnet_bn(num_classes=1000, pool5_norm=False))
    assert counts == PUBLISHED_PARAMETERS | {name: 2 * channels for name, channels in NORM_CHANNELS.items()}
    assert sum(counts.values()) == 60_967_976
    assert counts.pop("norm5") == 2 * 256
    assert without == counts


def test_layers_are_in_the_order_of_the_source() -> None:
    with torch.device("meta"):
        names = [name for name, _ in alexnet_bn(num_classes=10).named_children()]
    assert " ".join(names) == (
        "conv1 relu1 pool1 norm1 conv2 relu2 pool2 norm2 conv3 relu3 norm3 conv4 relu4 norm4 "
        "conv5 relu5 pool5 resize norm5 flatten fc6 relu6 drop6 fc7 relu7 drop7 fc8"
    )


@pytest.mark.parametrize(("size", "pooled"), [(39, 1), (64, 1), (224, 6), (227, 6), (256, 7)])
def test_pool5_has_the_size_of_fc6_at_224_and_227_pixels(size: int, pooled: int) -> None:
    with torch.device("meta"):
        model = alexnet(num_classes=10)
        x = torch.zeros(2, 3, size, size)
        for name, layer in model.named_children():
            x = layer(x)
            if name == "pool5":
                assert x.shape == (2, 256, pooled, pooled)
    assert x.shape == (2, 10)


def test_resizing_does_not_change_6x6() -> None:
    with torch.device("meta"):
        resize = alexnet(num_classes=10).get_submodule("resize")
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(resize(x), x)


def test_38_pixels_are_too_few() -> None:
    with torch.device("meta"):
        model = alexnet(num_classes=10)
        with pytest.raises(RuntimeError, match="too small"):
            model(torch.zeros(2, 3, 38, 38))


def test_memory_format_of_images_does_not_matter(grey: nn.Module) -> None:
    images = torch.randn(2, 1, 64, 64)
    grey.eval()
    with torch.no_grad():
        expected = grey(images)
        grey.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        logits = grey(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(logits, expected)


def test_initial_logits_are_neither_too_small_nor_too_large(grey: nn.Module) -> None:
    with torch.no_grad():
        assert 0.1 < grey.train()(torch.randn(8, 1, 64, 64)).std().item() < 2


def test_initial_weights_have_the_stated_distribution(grey: nn.Module) -> None:
    has_batch_norm = isinstance(grey.get_submodule("norm5"), nn.BatchNorm2d)
    for name, layer in grey.named_children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            std, bias = (0.005, 0.1) if name in ("fc6", "fc7") else (0.01, 0.01)
            if not has_batch_norm:
                std, bias = layer.weight[0].numel() ** -0.5, 0.0
            assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
            assert layer.bias is not None and torch.equal(layer.bias, torch.full_like(layer.bias, bias))


def test_every_parameter_gets_a_gradient(grey: nn.Module) -> None:
    grey.train()
    nn.functional.cross_entropy(grey(torch.randn(4, 1, 64, 64)), torch.tensor([1, 3, 5, 7])).backward()
    for name, parameter in grey.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_no_gamma_or_beta_decays() -> None:
    with torch.device("meta"):
        model = alexnet_bn(num_classes=10)
    groups = {group["name"]: group["param_names"] for group in parameter_groups(model, weight_decay=0.1)}
    assert groups["normalisation"] == [f"{norm}.{kind}" for norm in NORM_CHANNELS for kind in ("weight", "bias")]
    assert groups["biases"] == [f"{layer}.bias" for layer in PUBLISHED_PARAMETERS]


def test_small_alexnet_bn_has_the_same_layers_and_an_eighth_of_the_channels() -> None:
    with torch.device("meta"):
        small, full = small_alexnet_bn(num_classes=10), alexnet_bn(num_classes=10)
        assert small(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
        without = small_alexnet_bn(num_classes=10, pool5_norm=False)
    assert [name for name, _ in small.named_children()] == [name for name, _ in full.named_children()]
    assert tuple(8 * channels for channels in SMALL.channels) == FULL.channels
    assert sum(parameters_by_layer(small).values()) == 452_474
    assert parameters_by_layer(small).keys() - parameters_by_layer(without).keys() == {"norm5"}


def test_signals_of_small_alexnet_bn_are_as_strong() -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        full = alexnet_bn(num_classes=10).train()(torch.randn(8, 3, 224, 224)).std().item()
        small = small_alexnet_bn(num_classes=10).train()(torch.randn(64, 1, 28, 28)).std().item()
    assert small == pytest.approx(full, rel=0.5)
