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
def test_what_is_stored_is_what_is_counted(name: str) -> None:
    assert count_workload(ModelSettings(name=name), 224, 1000) == load_workload(name)


def test_flops_are_those_that_torch_counts_on_real_images() -> None:
    """Forward and backward together; where no convolution has groups, torch's count of backward is right."""
    workload = count_workload(ModelSettings(name="small_resnet"), 28, 10, num_channels=1)
    config = load_config("fashion", ["model.name=small_resnet"])
    model = make_model(config, DataShape(num_train=1, num_test=1, num_classes=10, num_channels=1))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(3, 1, 28, 28)).sum().backward()
    assert 3 * (workload.forward_flops + workload.backward_flops) == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["resnet50", "alexnet_bn"])
def test_activations_are_those_of_the_preview(name: str, precision: str) -> None:
    recipe = {"resnet50": "resnet50-imagenet-4k", "alexnet_bn": "alexnet-bn-imagenet-8k"}[name]
    config = load_config(recipe, [f"precision.name={precision}", "batch.micro=16"])
    model = make_model(config, IMAGENET)
    place_model(model, config.precision, torch.device("cpu"), channels_last=True)
    kept = activation_bytes(config, model, (3, 224, 224))
    element_bytes = config.precision.formats.model.itemsize
    assert 16 * load_workload(name).activation_bytes(element_bytes) == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize(("name", "image_size", "tolerance"), [("resnet50", 128, 1e-3), ("alexnet_bn", 320, 0.1)])
def test_scaling_a_workload_is_counting_it_at_the_other_size(name: str, image_size: int, tolerance: float) -> None:
    """AlexNet's convolutions round their sizes, so it is near and not equal."""
    counted = count_workload(ModelSettings(name=name), image_size, 1000)
    estimated = scaled(load_workload(name), image_size)
    assert estimated.forward_flops == pytest.approx(counted.forward_flops, rel=tolerance)
    assert estimated.backward_flops == pytest.approx(counted.backward_flops, rel=tolerance)
    assert estimated.activation_elements == pytest.approx(counted.activation_elements, rel=tolerance)


def test_frozen_layers_make_no_gradients_and_backward_does_not_come_to_them() -> None:
    settings = ModelSettings(name="resnet18", freeze=["conv1", "bn1", "layer1"])
    frozen, whole = (count_workload(one, 64, 10) for one in (settings, ModelSettings(name="resnet18")))
    assert frozen.forward_flops == whole.forward_flops
    beginning = [layer for layer in frozen.layers if layer.name.startswith(("conv1", "bn1", "layer1"))]
    assert not any(layer.is_in_backward for layer in beginning)
    first = next(layer for layer in frozen.layers if layer.name == "layer2.0.conv1")
    assert first.backward_flops == first.forward_flops  # nobody needs its input's gradient
    assert frozen.buffer_elements < whole.buffer_elements


class OneSize(nn.Module):
    """Its head has a weight for every pixel, and multiplies two activations."""

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


def test_a_users_own_network_is_counted_and_one_for_a_single_size_is_marked() -> None:
    workload = count_workload(ModelSettings(name=f"{__name__}:OneSize"), 16, 10)
    assert not workload.takes_any_size
    layers = {layer.name: layer for layer in workload.layers}
    assert layers["head"].forward_flops == 2 * 3 * 16 * 16 * 10
    assert layers["head"].backward_flops == 2 * layers["head"].forward_flops
    assert layers[""].forward_flops == 2 * 3 * 16**3  # what the network itself multiplies
    assert workload.num_parameters == 6 + 10 * (3 * 16 * 16 + 1)


def test_a_network_that_looks_at_values_is_to_be_measured() -> None:
    with pytest.raises(UserError, match=r"cannot be counted without computing .*megabatch profile"):
        count_workload(ModelSettings(name=f"{__name__}:Peeks"), 16, 10)
