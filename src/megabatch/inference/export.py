"""A trained network in the forms that others read: a torch.export program, ONNX, torchvision's state dict.

Programs compute in fp32, whatever the run did, on any number of images at a time, and are compared with the network
before their file appears.  With the preprocessing inside, a program takes uint8 images [N, C, S, S] of the size
that it was trained with; otherwise it takes them normalised.  Cropping and resizing stay outside.
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
TOLERANCE = 1e-3  # of the largest score: what rounding may change between two ways to add up
EXPORT_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
INPUT, OUTPUT = "images", "scores"
METADATA = "megabatch"  # the name under which a file tells its classes and its preprocessing


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What is exported: a network and what belongs to it."""

    network: nn.Module  # in whatever precision it was trained
    mean: list[float]  # of pixels from 0 to 255, per channel
    deviation: list[float]
    classes: list[str]
    image_size: int
    num_channels: int
    preprocessing_inside: bool = False

    def module(self) -> nn.Module:
        """A copy in fp32, on the CPU, in evaluation mode; the network itself stays as it is."""
        with one_line(self, "fp32"):
            network = copy_in_fp32(self.network).cpu().eval()
        return Normalised(network, self.mean, self.deviation) if self.preprocessing_inside else network

    def images(self, count: int = CHECKED_IMAGES) -> torch.Tensor:
        """Noise, such as the program takes."""
        shape = (count, self.num_channels, self.image_size, self.image_size)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        return pixels if self.preprocessing_inside else Normalised(nn.Identity(), self.mean, self.deviation)(pixels)

    def metadata(self) -> str:
        """What whoever uses the program needs to know, as JSON."""
        return json.dumps(
            {
                "classes": self.classes,
                "image_size": self.image_size,
                "num_channels": self.num_channels,
                "mean": self.mean,
                "deviation": self.deviation,
                "preprocessing_inside": self.preprocessing_inside,
            }
        )


class Normalised(nn.Module):
    """uint8 images to the scores of a network that takes them with zero mean and unit deviation per channel."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, network: nn.Module, mean: list[float], deviation: list[float]) -> None:
        super().__init__()
        self.network = network
        wide_mean, wide_deviation = (torch.tensor(values, dtype=torch.float64) for values in (mean, deviation))
        # As `data/pipeline/normalise.py` rounds them, so that scores are those of evaluation.
        self.register_buffer("scale", (1 / wide_deviation).float().view(1, -1, 1, 1))
        self.register_buffer("shift", (-wide_mean / wide_deviation).float().view(1, -1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(images.float() * self.scale + self.shift)
        return scores


def export_torch(exported: Exported, out: Path) -> float:
    """Writes a torch.export program; returns by how much its scores differ, as a share of the largest."""
    module = exported.module()
    program = trace(module, exported)
    with writing(out) as new, quiet():
        file = new.with_name(f"{new.name}.pt2")  # torch wants the suffix
        try:
            torch.export.save(program, file, extra_files={METADATA: exported.metadata()})
            loaded = torch.export.load(file).module()
            difference = compare(exported, module, lambda images: loaded(images))
            file.rename(new)
        finally:
            file.unlink(missing_ok=True)
    return difference


def export_onnx(exported: Exported, out: Path) -> float:
    """Writes ONNX, checked with onnxruntime; returns by how much its scores differ, as a share of the largest."""
    missing = [name for name in EXPORT_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX needs {', '.join(missing)}; pip install 'megabatch[export]'")
    module = exported.module()
    program = trace(with_maxima(exported.module()), exported)
    with writing(out) as new, quiet(), one_line(exported, "ONNX"):
        onnx_program = torch.onnx.export(
            program, input_names=[INPUT], output_names=[OUTPUT], dynamo=True, verbose=False
        )
        assert onnx_program is not None
        onnx_program.model.metadata_props[METADATA] = exported.metadata()
        onnx_program.save(new, external_data=False)
        difference = compare(exported, module, onnx_session(new))
    return difference


class Maxima(nn.Module):
    """nn.AdaptiveMaxPool2d(1) in other words."""

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
    """Writes a state dict under torchvision's names (.safetensors, or else a pickle); returns how to load it there."""
    if exported.preprocessing_inside:
        raise UserError("a state dict holds no preprocessing; leave --preprocessing out, or export --torch or --onnx")
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
    grey = "" if exported.num_channels == 3 else f", after its conv1 was made for {exported.num_channels} channels"
    return f"{made_there}.load_state_dict({load}){grey}"


def torchvision_call(network: nn.Module, num_classes: int) -> str:
    """How the network is made there; UserError if torchvision does not have it."""
    if isinstance(network, ResNet):
        stages = [getattr(network, f"layer{number}") for number in (1, 2, 3, 4)]
        built_of = (type(stages[0][0]), tuple(len(stage) for stage in stages))
        name = next(name for name, factory in RESNETS.items() if factory.args == built_of)
        return f"torchvision.models.{name}(num_classes={num_classes})"
    if type(network).__module__.startswith("torchvision.models."):
        return "model"  # whoever named it in the recipe knows how it is made
    raise UserError(
        "torchvision has no such network under its names: ours are "
        f"{', '.join(RESNETS)} (its AlexNet has other layers than ours); export --torch or --onnx"
    )


def trace(module: nn.Module, exported: Exported) -> torch.export.ExportedProgram:
    """The module as a graph, for any number of images."""
    with quiet(), one_line(exported, "torch.export"), torch.no_grad():
        images = exported.images()
        batch = torch.export.Dim("batch", min=1)
        return torch.export.export(module, (images,), dynamic_shapes=({0: batch},))


def compare(exported: Exported, module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The largest difference of scores, as a share of the largest score; UserError if another class comes first.

    Where two classes are closer than rounding, either may.
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
            f"the exported {type(exported.network).__name__} answers other than the network does (scores differ by "
            f"{difference:.1%} of the largest); nothing is written, as this version of torch does not export it right"
        )
    return difference


@contextmanager
def one_line(exported: Exported, form: str) -> Iterator[None]:
    """What cannot be exported is a property of the network, and a traceback through torch does not help."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(
            f"{type(exported.network).__name__} cannot be exported to {form} ({reason}); its forward must do the same "
            "for any images and any number of them"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch's exporters have to say of themselves."""
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
