"""The FLOPs and gradients of a network, layer by layer, for one image.

Legend: F_l, B_l are the FLOPs of layer l in forward and backward; a multiply-add is two.  As usual, only products are
counted (convolutions, linear layers).  Backward has one product per factor that needs a gradient: B_l = 2 F_l, or F_l
in the first layer, whose input needs none.

A backward pass of T seconds, of which t0 do not depend on the batch (launches), has passed layer l of L after
    ready_l = sum over k from the last layer to l of  t0 / L + (T - t0) B_k / sum(B).
Elementwise operations (BatchNorm, ReLU) are limited by memory, not arithmetic; here they are shared like the products.

`preflight/count.py` counts a network.  The networks of published runs are stored for 224 pixels and 1,000 classes
(`tools/count_workloads.py`).
"""

from importlib import resources

import msgspec
from msgspec import Struct

from megabatch.errors import UserError, nearest
from megabatch.planning.pipeline import ELEMENT_BYTES, Gradient, GradientDtype, RecordedBackward

FOLDER = resources.files("megabatch.simulate") / "workloads"
STORED = ("resnet50", "alexnet", "alexnet_bn")


class Layer(Struct, frozen=True, kw_only=True):
    """A module that has parameters or multiplies."""

    name: str
    forward_flops: float  # per image
    backward_flops: float
    parameters: dict[str, int]  # elements of each trained parameter by its name in the network, as registered
    scales_with_area: bool  # FLOPs grow with the area of the image

    @property
    def is_in_backward(self) -> bool:
        """False for frozen layers before the first trained layer, which backward does not reach."""
        return bool(self.backward_flops or self.parameters)


class Workload(Struct, frozen=True, kw_only=True):
    model: str
    image_size: int
    num_classes: int
    layers: list[Layer]  # in the order of forward
    activation_elements: int  # stored for backward, per image
    index_bytes: int  # also stored, in any precision: indices of max-pool, labels
    takes_any_size: bool  # images of other sizes use the same parameters

    @property
    def num_parameters(self) -> int:
        return sum(sum(layer.parameters.values()) for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def backward_flops(self) -> float:
        return sum(layer.backward_flops for layer in self.layers)

    def activation_bytes(self, element_bytes: int) -> int:
        """Return the memory of the activations of one image."""
        return element_bytes * self.activation_elements + self.index_bytes


def load_workload(model: str) -> Workload:
    if model not in STORED:
        raise UserError(
            f"the workload of {model!r} is not stored ({', '.join(STORED)}); nearest: {nearest(model, STORED)}"
        )
    return msgspec.json.decode((FOLDER / f"{model}.json").read_bytes(), type=Workload)


def scaled(workload: Workload, image_size: int) -> Workload:
    """Return the workload for square images of another size: convolutions and activations grow with the area.

    This is exact if every layer divides its input evenly, as ResNets do for multiples of 32 pixels.
    """
    if not workload.takes_any_size and image_size != workload.image_size:
        raise UserError(
            f"image_size={image_size}: {workload.model} was counted for {workload.image_size} pixels, and other sizes "
            f"change its parameters or do not run; nearest: image_size={workload.image_size}"
        )
    area = (image_size / workload.image_size) ** 2
    return msgspec.structs.replace(
        workload,
        image_size=image_size,
        layers=[scaled_layer(layer, area) if layer.scales_with_area else layer for layer in workload.layers],
        activation_elements=round(area * workload.activation_elements),
        index_bytes=round(area * workload.index_bytes),
    )


def scaled_layer(layer: Layer, area: float) -> Layer:
    return msgspec.structs.replace(
        layer, forward_flops=area * layer.forward_flops, backward_flops=area * layer.backward_flops
    )


def timed_backward(
    workload: Workload, backward_s: float, fixed_s: float = 0.0, dtype: GradientDtype = "fp32"
) -> RecordedBackward:
    """Return a backward pass of `backward_s`: layers share `fixed_s` evenly and the rest by FLOPs."""
    assert 0 <= fixed_s <= backward_s, f"{fixed_s} s of {backward_s} s"
    layers = [layer for layer in reversed(workload.layers) if layer.is_in_backward]
    each_s, per_flop_s = fixed_s / len(layers), (backward_s - fixed_s) / workload.backward_flops
    names: list[str] = []
    gradients: list[Gradient] = []
    ready_s: list[float] = []
    past_s = 0.0
    for layer in layers:
        past_s += each_s + per_flop_s * layer.backward_flops
        for name, num_elements in reversed(layer.parameters.items()):
            names.append(name)
            gradients.append(Gradient(num_elements * ELEMENT_BYTES[dtype], dtype))
            ready_s.append(past_s)
    return RecordedBackward(names, gradients, ready_s)
