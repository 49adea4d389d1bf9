"""Count the FLOPs and saved activations of a network on fake tensors, without computing or allocating anything.

Forward FLOPs are torch's count (`torch.utils.flop_counter`), by module.  Backward FLOPs are the forward FLOPs once for
each factor that needs a gradient.  torch's own backward count is not used: it counts the weight gradient of a grouped
convolution once per group, and cannot attribute backward to modules where branches meet.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings, build_model, model_errors
from megabatch.models.layers import freeze
from megabatch.models.loss import LossSettings, summed_loss
from megabatch.simulate.workload import Layer, Workload
from megabatch.torch_api import FakeTensorMode, silent_fake_tensors, storage_id

IMAGES = 2  # per batch: BatchNorm cannot normalise a single image
CLEARLY_MORE = 2.0  # ratio of FLOPs at four times the area


class SavedTensor(NamedTuple):
    tensor: torch.Tensor  # keeps the storage alive, so that its address is not reused
    num_bytes: int  # of the storage


class CountedWork(NamedTuple):
    """Counts of a forward pass."""

    flops: dict[str, int]  # by module without its children, in calling order
    input_needs_gradient: set[str]  # modules
    saved: list[SavedTensor]


def count_workload(settings: ModelSettings, image_size: int, num_classes: int, num_channels: int = 3) -> Workload:
    """Count a network; raise UserError if it does not run on fake tensors."""
    with fake_tensors(settings):
        model = make(settings, image_size, num_classes, num_channels)
        work = run(settings, model, IMAGES, (num_channels, image_size, image_size))
        more_images = run(settings, model, 2 * IMAGES, (num_channels, image_size, image_size))
    larger = count_larger(settings, model, image_size, num_classes, num_channels)
    # Tensors saved per batch, such as the mean of a BatchNorm, do not count as an image's.
    of_image = {
        is_number: (saved_bytes(more_images.saved, is_number) - saved_bytes(work.saved, is_number)) // IMAGES
        for is_number in (True, False)
    }
    return Workload(
        model=settings.name,
        image_size=image_size,
        num_classes=num_classes,
        layers=list_layers(model, work, larger),
        activation_elements=of_image[True] // torch.float32.itemsize,
        index_bytes=of_image[False],
        takes_any_size=larger is not None,
    )


@contextmanager
def fake_tensors(settings: ModelSettings) -> Iterator[None]:
    try:
        with silent_fake_tensors(), FakeTensorMode():
            yield
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"model.name={settings.name!r} cannot be counted without computing ({reason}); "
            "measure it instead: megabatch profile RECIPE"
        ) from error


def make(settings: ModelSettings, image_size: int, num_classes: int, num_channels: int) -> nn.Module:
    model = build_model(settings, 1, num_classes, num_channels, image_size)
    return freeze(model, settings.freeze or [])


def count_larger(
    settings: ModelSettings, model: nn.Module, image_size: int, num_classes: int, num_channels: int
) -> CountedWork | None:
    """Count at twice the height and width; None if the network rejects it or has other parameters then."""
    try:
        with fake_tensors(settings):
            other = make(settings, 2 * image_size, num_classes, num_channels)
            if shapes(other) != shapes(model):
                return None
            return run(settings, other, IMAGES, (num_channels, 2 * image_size, 2 * image_size))
    except (UserError, ValueError):
        return None


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def run(settings: ModelSettings, model: nn.Module, num_images: int, image_shape: tuple[int, ...]) -> CountedWork:
    called: dict[str, int] = {}
    input_needs_gradient = set()

    def note_call(name: str, inputs: tuple[object, ...]) -> None:
        called[name] = 0
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
            input_needs_gradient.add(name)

    handles = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: note_call(name, inputs))
        for name, module in model.named_modules()
    ]
    images, labels = torch.empty(num_images, *image_shape), torch.empty(num_images, dtype=torch.int64)
    try:
        with (
            model_errors(settings, images.shape),
            saved_for_backward([*model.parameters(), *model.buffers()]) as saved,
            FlopCounterMode(display=False) as counter,
        ):
            summed_loss(LossSettings(), model(images), labels)
    finally:
        for handle in handles:
            handle.remove()
    counts = counter.get_flop_counts()

    def flops_inside(name: str) -> int:
        path = f"{type(model).__name__}.{name}" if name else type(model).__name__
        return sum(counts[path].values()) if path in counts else 0

    for name in called:
        prefix = f"{name}." if name else ""
        children = [child for child, _ in model.get_submodule(name).named_children()]
        called[name] = flops_inside(name) - sum(flops_inside(prefix + child) for child in children)
    return CountedWork(called, input_needs_gradient, list(saved.values()))


@contextmanager
def saved_for_backward(owned: Iterable[torch.Tensor]) -> Iterator[dict[int, SavedTensor]]:
    """Collect the tensors that autograd saves in the block, except those of the network.

    They are collected by storage, so that a tensor saved twice counts once.
    """
    known = {storage_id(tensor.untyped_storage()) for tensor in owned}
    saved: dict[int, SavedTensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in known:
            saved[storage_id(storage)] = SavedTensor(tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, save):
        yield saved


def saved_bytes(saved: Iterable[SavedTensor], is_number: bool) -> int:
    return sum(one.num_bytes for one in saved if one.tensor.is_floating_point() == is_number)


def list_layers(model: nn.Module, work: CountedWork, larger: CountedWork | None) -> list[Layer]:
    """Return the layers with parameters or FLOPs.  Parameters of a module that is never called are its parent's."""
    trained: dict[str, dict[str, int]] = {name: {} for name in work.flops}
    has_parameters = set()
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        while owner not in trained:
            owner = owner.rpartition(".")[0]
        has_parameters.add(owner)
        if parameter.requires_grad:
            trained[owner][name] = parameter.numel()
    layers = []
    for name, flops in work.flops.items():
        if not flops and name not in has_parameters:
            continue
        by_weight = bool(trained[name]) if name in has_parameters else name in work.input_needs_gradient
        num_factors = by_weight + (name in work.input_needs_gradient)
        layers.append(
            Layer(
                name=name,
                forward_flops=flops / IMAGES,
                backward_flops=num_factors * flops / IMAGES,
                parameters=trained[name],
                scales_with_area=larger is not None and larger.flops[name] > CLEARLY_MORE * flops,
            )
        )
    return layers
