import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model
from megabatch.data.sources.shapes import IMAGENET, DataShape
from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings
from megabatch.precision.cast import place_model
from megabatch.preflight.count import count_workload
from megabatch.preflight.preview import activation_bytes
from megabatch.simulate.workload import STORED, load_workload, scaled


@pytest.mark.parametrize("name", STORED)
def test_stored_workloads_match_the_count(name: str) -> None:
    assert count_workload(ModelSettings(name=name), 224, 1000) == load_workload(name)


def test_flops_match_torchs_count_on_real_images() -> None:
    """Compare forward and backward. torch counts backward correctly if no convolution has groups."""
    workload = count_workload(ModelSettings(name="small_resnet"), 28, 10, num_channels=1)
    config = load_config("fashion", ["model.name=small_resnet"])
    model = make_model(config, DataShape(num_train=1, num_test=1, num_classes=10, num_channels=1))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(3, 1, 28, 28)).sum().backward()
    assert 3 * (workload.forward_flops + workload.backward_flops) == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["resnet50", "alexnet_bn"])
def test_activations_match_the_preview(name: str, precision: str) -> None:
    recipe = {"resnet50": "resnet50-imagenet-4k", "alexnet_bn": "alexnet-bn-imagenet-8k"}[name]
    config = load_config(recipe, [f"precision.name={precision}", "batch.micro=16"])
    model = make_model(config, IMAGENET)
    place_model(model, config.precision, torch.device("cpu"), channels_last=True)
    expected = activation_bytes(config, model, (3, 224, 224))
    element_bytes = config.precision.formats.model.itemsize
    assert 16 * load_workload(name).activation_bytes(element_bytes) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("name", "image_size", "tolerance"), [("resnet50", 128, 1e-3), ("alexnet_bn", 320, 0.1)])
def test_scaled_workload_matches_the_count_at_the_other_size(name: str, image_size: int, tolerance: float) -> None:
    """AlexNet's convolutions round their sizes, so the match is only approximate."""
    counted = count_workload(ModelSettings(name=name), image_size, 1000)
    estimated = scaled(load_workload(name), image_size)
    assert estimated.forward_flops == pytest.approx(counted.forward_flops, rel=tolerance)
    assert estimated.backward_flops == pytest.approx(counted.backward_flops, rel=tolerance)
    assert estimated.activation_elements == pytest.approx(counted.activation_elements, rel=tolerance)


def test_frozen_layers_have_no_gradients_and_no_backward() -> None:
    settings = ModelSettings(name="resnet18", freeze=["conv1", "bn1", "layer1"])
    frozen, whole = (count_workload(one, 64, 10) for one in (settings, ModelSettings(name="resnet18")))
    assert frozen.forward_flops == whole.forward_flops
    beginning = [layer for layer in frozen.layers if layer.name.startswith(("conv1", "bn1", "layer1"))]
    assert not any(layer.is_in_backward for layer in beginning)
    first = next(layer for layer in frozen.layers if layer.name == "layer2.0.conv1")
    assert first.backward_flops == first.forward_flops  # its input needs no gradient


class OneSize(nn.Module):
    """A network whose head has a weight per pixel and multiplies two activations."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3 * image_size**2, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.norm(images)
        logits: torch.Tensor = self.head((images @ images).flatten(1))
        return logits


class Peeks(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean = images.mean((2, 3))
        logits: torch.Tensor = self.head(mean if mean.max().item() > 0 else -mean)
        return logits


def test_user_defined_networks_are_counted_and_fixed_sizes_marked() -> None:
    workload = count_workload(ModelSettings(name=f"{__name__}:OneSize"), 16, 10)
    assert not workload.takes_any_size
    layers = {layer.name: layer for layer in workload.layers}
    assert layers["head"].forward_flops == 2 * 3 * 16 * 16 * 10
    assert layers["head"].backward_flops == 2 * layers["head"].forward_flops
    assert layers[""].forward_flops == 2 * 3 * 16**3  # in the forward of the network itself
    assert workload.num_parameters == 6 + 10 * (3 * 16 * 16 + 1)


def test_network_that_depends_on_values_must_be_measured() -> None:
    with pytest.raises(UserError, match=r"cannot be counted without computing .*megabatch profile"):
        count_workload(ModelSettings(name=f"{__name__}:Peeks"), 16, 10)
