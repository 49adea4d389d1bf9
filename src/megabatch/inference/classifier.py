"""A trained model in plain PyTorch: images in, scores out, prepared exactly as evaluation prepares them.

classifier = megabatch.load("runs/photos-001")
scores = classifier([PIL.Image.open("a.jpg"), PIL.Image.open("b.png")])     # [2, classes]
classifier.classes[scores[0].argmax()]
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.overrides import TorchFunctionMode

from megabatch.data.pipeline.augment import central_box
from megabatch.data.pipeline.decode import Unreadable, decode_crop, eight_bits, resize
from megabatch.data.pipeline.normalise import Normalise
from megabatch.data.settings import MAX_PIXELS
from megabatch.errors import UserError
from megabatch.io.tensor_header import Entry
from megabatch.models.catalog import ModelSettings, build_model, model_errors
from megabatch.models.named_code import require_named
from megabatch.precision.cast import place_model
from megabatch.precision.policy import PrecisionSettings
from megabatch.runs.model_card import ModelCard
from megabatch.training.checkpoint.card import pixels_of
from megabatch.training.checkpoint.format import DTYPES
from megabatch.training.checkpoint.weights import SavedWeights, find_weights

Picture = Image.Image | torch.Tensor


def load(
    run: str | Path,
    checkpoint: str | None = None,
    *,
    device: str = "cpu",
    network: nn.Module | None = None,
    model: str | None = None,
) -> "Classifier":
    """The model of a run's folder (or of its model.safetensors): the final one, or that of a checkpoint such as `best`.

    A model that was trained by `fit` needs its `network`, which gets the weights.  One that is Python code of its own
    needs its name as `model`, "package.module:factory": a file does not decide what is imported and run.
    """
    return make_classifier(find_weights(Path(run), checkpoint), torch.device(device), network, model)


def make_classifier(
    weights: SavedWeights, device: torch.device, network: nn.Module | None = None, named: str | None = None
) -> "Classifier":
    card = weights.card
    settings = settings_of(weights)
    precision = PrecisionSettings(name=card.precision)
    layout, model = weights.layout(), network
    if model is None:
        remedy = f"--model {settings.name} (in Python: model={settings.name!r}, or the network itself)"
        require_named(settings, named, str(weights.path), remedy)
        if not settings.is_users_own:
            with NotInitialised(), torch.device("meta"):  # before there is memory for whatever the card asks for
                require_fit(weights, layout, build(settings, card))
        model = build(settings, card)
    model.to(precision.formats.update)  # fp64 would be rounded
    require_fit(weights, layout, model)
    try:
        model.load_state_dict(weights.read())
    except RuntimeError as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{weights.path} does not fit {settings.name} ({line}); give the network of the run") from None
    place_model(model, precision, device, settings.wants_channels_last)
    normalise = Normalise(pixels_of(card), device, precision.formats.model, settings.wants_channels_last)
    return Classifier(model, normalise, card, settings)


class NotInitialised(TorchFunctionMode):
    """Tensors on meta have no values; to draw normal ones there torch first imports for seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.normal_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def settings_of(weights: SavedWeights) -> ModelSettings:
    given = {key: value for key, value in weights.card.model.items() if value is not None}
    try:
        return msgspec.convert(given, ModelSettings)
    except msgspec.ValidationError as error:
        raise UserError(f"{weights.path} does not say which model it is of ({error}); train it again") from None


def build(settings: ModelSettings, card: ModelCard) -> nn.Module:
    return build_model(settings, 0, len(card.classes), card.num_channels, card.image_size)


def require_fit(weights: SavedWeights, layout: dict[str, Entry], model: nn.Module) -> None:
    """By shapes, and by what numbers are: torch would round an int8 to a weight."""
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or name not in layout:  # which load_state_dict will say
            continue
        entry = layout[name]
        dtype = DTYPES[entry.dtype]
        is_other = dtype.is_complex or (tensor.is_floating_point() and not dtype.is_floating_point)
        if list(tensor.shape) != entry.shape or is_other:
            raise UserError(
                f"{weights.path} does not fit {weights.card.model['name']}: {name} is {entry} there, and "
                f"{tensor.dtype} {list(tensor.shape)} in the model; give the network of the run"
            )


class Classifier(nn.Module):
    """Takes a PIL image, a uint8 tensor [C, H, W] or [N, C, H, W], or a list of either; returns scores [N, classes]."""

    def __init__(self, network: nn.Module, normalise: Normalise, card: ModelCard, settings: ModelSettings) -> None:
        super().__init__()
        self.network, self.normalise, self.card, self.settings = network.eval(), normalise, card, settings
        self.classes = tuple(card.classes)
        self.image_size, self.num_channels = card.image_size, card.num_channels

    def forward(self, images: Picture | Sequence[Picture]) -> torch.Tensor:
        prepared = self.prepare(images)
        with model_errors(self.settings, prepared.shape):  # a card may say that images are too small for the network
            return self.network(self.normalise(prepared)).float()  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> "Classifier":
        """It stays as evaluation has it."""
        return super().train(False)

    def prepare(self, images: Picture | Sequence[Picture]) -> torch.Tensor:
        """uint8 [N, C, S, S], as evaluation sees them."""
        if isinstance(images, torch.Tensor) and images.ndim == 4:
            images = list(images)
        elif isinstance(images, Image.Image | torch.Tensor):
            images = [images]
        if not images:
            return torch.empty(0, self.num_channels, self.image_size, self.image_size, dtype=torch.uint8)
        return torch.stack([self.prepare_one(image) for image in images])

    def prepare_one(self, image: Picture) -> torch.Tensor:
        if isinstance(image, Image.Image):
            return self.prepare_picture(image)
        expected = f"uint8 [{self.num_channels}, H, W]"
        if not isinstance(image, torch.Tensor) or image.dtype != torch.uint8 or image.ndim != 3:
            what = f"{image.dtype} {list(image.shape)}" if isinstance(image, torch.Tensor) else type(image).__name__
            raise UserError(f"an image is {what}; expected a PIL image or a tensor, {expected}")
        if image.shape[0] != self.num_channels:
            raise UserError(f"an image is {list(image.shape)}; expected {expected}")
        if image.shape[1:] == (self.image_size, self.image_size):
            return image
        colours = image.expand(3, -1, -1) if self.num_channels == 1 else image
        return self.crop(colours.permute(1, 2, 0).cpu().numpy())

    def prepare_picture(self, image: Image.Image) -> torch.Tensor:
        content = undecoded(image)
        if content is None:
            return self.crop(np.asarray(eight_bits(image).convert("RGB")))
        try:
            lines = decode_crop(content, self.box, self.image_size, MAX_PIXELS)
        except Unreadable as error:
            raise UserError(f"{getattr(image, 'filename', '') or 'an image'} cannot be read: {error}") from None
        return self.resized(lines)

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        return central_box(height, width, self.card.center_crop)

    def crop(self, pixels: Any) -> torch.Tensor:
        """Of pixels [H, W, 3]."""
        top, left, rows, columns = self.box(*pixels.shape[:2])
        return self.resized(np.ascontiguousarray(pixels[top : top + rows, left : left + columns]).reshape(rows, -1))

    def resized(self, lines: Any) -> torch.Tensor:
        out = torch.empty(3, self.image_size, self.image_size, dtype=torch.uint8)
        resize(lines, out)
        return grey(out) if self.num_channels == 1 else out


def undecoded(image: Image.Image) -> bytes | None:
    """The bytes of a file that Pillow has opened and not decoded yet: then our decoder makes what evaluation saw."""
    file = getattr(image, "fp", None)
    if file is None or getattr(image, "_im", None) is not None or getattr(image, "n_frames", 1) > 1:
        return None
    try:
        file.seek(0)
        return bytes(file.read())
    except (OSError, ValueError, io.UnsupportedOperation):
        return None


def grey(colours: torch.Tensor) -> torch.Tensor:
    """[..., 3, H, W] -> [..., 1, H, W] as Pillow's mode L."""
    red, green, blue = colours.to(torch.int32).unbind(-3)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8).unsqueeze(-3)
