"""Export of a trained network as a torch.export program, ONNX or a state dict of torchvision.

Programs compute in fp32, independent of the precision of the run, and take any number of images. Each one is compared
with the network before its file is written. With preprocessing, a program takes uint8 images [N, C, S, S] of the size
used in evaluation; without it, normalised images. Cropping and resizing are not included; the metadata has their sizes.
"""

import importlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from megabatch.errors import UserError
from megabatch.io.disk import writing
from megabatch.models.resnet import RESNETS, ResNet
from megabatch.precision.cast import copy_in_fp32

CHECKED_IMAGES = 8
TOLERANCE = 1e-3  # of the largest score; allows for a different order of additions
EXPORT_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INPUT, OUTPUT = "images", "scores"
METADATA = "megabatch"  # key of the classes and the preprocessing in a file


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A network to export, with its classes and preprocessing."""

    network: nn.Module  # in the precision of the run
    mean: list[float]  # of pixels from 0 to 255, per channel
    deviation: list[float]
    classes: list[str]
    center_crop: float  # side of the central square that is resized, as a share of the image's shorter side
    image_size: int
    num_channels: int
    preprocessing_inside: bool = False

    def module(self) -> nn.Module:
        """Return a copy in fp32, on the CPU, in evaluation mode."""
        with export_errors(self, "fp32"):
            network = copy_in_fp32(self.network).cpu().eval()
        return Normalised(network, self.mean, self.deviation) if self.preprocessing_inside else network

    def images(self, count: int = CHECKED_IMAGES) -> torch.Tensor:
        """Return noise in the format that the program takes."""
        shape = (count, self.num_channels, self.image_size, self.image_size)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        return pixels if self.preprocessing_inside else Normalised(nn.Identity(), self.mean, self.deviation)(pixels)

    def metadata(self) -> str:
        """Return the classes and the preprocessing as JSON."""
        return json.dumps(
            {
                "classes": self.classes,
                "center_crop": self.center_crop,
                "image_size": self.image_size,
                "num_channels": self.num_channels,
                "mean": self.mean,
                "deviation": self.deviation,
                "preprocessing_inside": self.preprocessing_inside,
            }
        )


class Normalised(nn.Module):
    """A network that takes uint8 images and normalises them to zero mean and unit deviation per channel."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, network: nn.Module, mean: list[float], deviation: list[float]) -> None:
        super().__init__()
        self.network = network
        wide_mean, wide_deviation = (torch.tensor(values, dtype=torch.float64) for values in (mean, deviation))
        # Rounded like data/pipeline/normalise.py, so that scores equal those of evaluation.
        self.register_buffer("scale", (1 / wide_deviation).float().view(1, -1, 1, 1))
        self.register_buffer("shift", (-wide_mean / wide_deviation).float().view(1, -1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(images.float() * self.scale + self.shift)
        return scores


def export_torch(exported: Exported, out: Path) -> float:
    """Write a torch.export program; return the largest difference of its scores, as a share of the largest score."""
    module = exported.module()
    program = trace(module, exported)
    with writing(out) as new, quiet():
        file = new.with_name(f"{new.name}.pt2")  # torch requires the suffix
        try:
            torch.export.save(program, file, extra_files={METADATA: exported.metadata()})
            loaded = torch.export.load(file).module()
            difference = compare(exported, module, lambda images: loaded(images))
            file.rename(new)
        finally:
            file.unlink(missing_ok=True)
    return difference


def export_onnx(exported: Exported, out: Path) -> float:
    """Write ONNX, checked with onnxruntime; return the largest difference of its scores, as in `export_torch`."""
    missing = [name for name in EXPORT_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--onnx needs {', '.join(missing)}; run pip install 'megabatch[export]'")
    module = exported.module()
    program = trace(with_maxima(exported.module()), exported)
    with writing(out) as new, quiet(), export_errors(exported, "ONNX"):
        onnx_program = torch.onnx.export(
            program, input_names=[INPUT], output_names=[OUTPUT], dynamo=True, verbose=False
        )
        assert onnx_program is not None
        name_batch_axis(onnx_program.model.graph)
        onnx_program.model.metadata_props[METADATA] = exported.metadata()
        onnx_program.save(new, external_data=False)
        difference = compare(exported, module, onnx_session(new))
    return difference


def name_batch_axis(graph: Any) -> None:
    """Rename the batch axis, which torch numbers (s34), in all shapes."""
    numbered = graph.inputs[0].shape[0]
    for value in [*graph.inputs, *graph.outputs, *(output for node in graph for output in node.outputs)]:
        for axis, size in enumerate(value.shape or ()):
            if size == numbered:
                value.shape[axis] = "batch"


class Maxima(nn.Module):
    """Equivalent of nn.AdaptiveMaxPool2d(1)."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.amax((-2, -1), keepdim=True)


def with_maxima(module: nn.Module) -> nn.Module:
    """Replace every nn.AdaptiveMaxPool2d(1) in place: torch before 2.13 does not write it as ONNX."""
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.AdaptiveMaxPool2d) and child.output_size in (1, (1, 1)) and not child.return_indices:
            module.set_submodule(name, Maxima())
    return module


def onnx_session(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    session = importlib.import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(images: torch.Tensor) -> torch.Tensor:
        (scores,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(scores)

    return run


def export_torchvision(exported: Exported, out: Path) -> str:
    """Write a state dict with torchvision's names (.safetensors or pickle); return the code that loads it."""
    if exported.preprocessing_inside:
        raise UserError("--preprocessing: a state dict has no preprocessing; remove it, or use --torch or --onnx")
    made_there = torchvision_call(exported.network, len(exported.classes))
    state = {
        key: tensor.detach().cpu().contiguous() for key, tensor in copy_in_fp32(exported.network).state_dict().items()
    }
    as_safetensors = out.suffix == ".safetensors"
    with writing(out) as new:
        if as_safetensors:
            save_file(state, new, metadata={METADATA: exported.metadata()})
            new.chmod(0o644)
        else:
            torch.save(state, new)
    load = f"safetensors.torch.load_file({out.name!r})" if as_safetensors else f"torch.load({out.name!r})"
    grey = (
        "" if exported.num_channels == 3 else f", after replacing its conv1 by one for {exported.num_channels} channels"
    )
    return f"{made_there}.load_state_dict({load}){grey}"


def torchvision_call(network: nn.Module, num_classes: int) -> str:
    """Return the code that builds the network in torchvision; raise UserError if torchvision does not have it."""
    if isinstance(network, ResNet) and isinstance(network.maxpool, nn.Identity):
        raise UserError("--torchvision: torchvision has no ResNet with model.options.stem=small; use --torch or --onnx")
    if isinstance(network, ResNet):
        stages = [getattr(network, f"layer{number}") for number in (1, 2, 3, 4)]
        built_of = (type(stages[0][0]), tuple(len(stage) for stage in stages))
        name = next(name for name, factory in RESNETS.items() if factory.args == built_of)
        return f"torchvision.models.{name}(num_classes={num_classes})"
    if type(network).__module__.startswith("torchvision.models."):
        return "model"  # the user named it in the recipe
    raise UserError(
        f"--torchvision: {type(network).__name__} is not in torchvision; expected {', '.join(RESNETS)} "
        "(torchvision's AlexNet has different layers); use --torch or --onnx"
    )


def trace(module: nn.Module, exported: Exported) -> torch.export.ExportedProgram:
    """Trace the module into a graph for any number of images."""
    with quiet(), export_errors(exported, "torch.export"), torch.no_grad():
        images = exported.images()
        batch = torch.export.Dim("batch", min=1)
        return torch.export.export(module, (images,), dynamic_shapes=({0: batch},))


def compare(exported: Exported, module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Return the largest difference of scores, as a share of the largest score.

    Raises:
        UserError: another class has the best score. Classes that differ by less than rounding may swap.
    """
    images = exported.images()
    with torch.no_grad():
        expected, found = module(images), run(images)
        one = run(images[:1])
    scale = float(expected.abs().max()) or 1.0
    difference = float((found - expected).abs().max()) / scale
    behind = expected.amax(1) - expected.gather(1, found.argmax(1, keepdim=True))[:, 0]
    is_same = found.shape == expected.shape and one.shape == expected[:1].shape and bool(found.isfinite().all())
    if not is_same or float(behind.max()) > TOLERANCE * scale:
        raise UserError(
            f"the exported {type(exported.network).__name__} does not match the network (scores differ by "
            f"{difference:.1%} of the largest), so it was not written; try another version of torch"
        )
    return difference


@contextmanager
def export_errors(exported: Exported, form: str) -> Iterator[None]:
    """Turn an exporter's exception into one line: the network causes it, and its traceback does not help."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"{type(exported.network).__name__} cannot be exported to {form} ({reason}); its forward must not depend "
            "on the values or the number of images"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log messages and warnings of torch's exporters."""
    loggers: list[Any] = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
