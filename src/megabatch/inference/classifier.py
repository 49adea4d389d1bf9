"""A trained model in plain PyTorch: images in, scores out, with the image preparation of evaluation.

classifier = megabatch.load("runs/photos-001")
scores = classifier(["a.jpg", PIL.Image.open("b.png")])     # [2, classes]
classifier.classes[scores[0].argmax()]
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.overrides import TorchFunctionMode

from megabatch.data.pipeline.augment import central_box
from megabatch.data.pipeline.decode import Unreadable, decode_crop, eight_bits, resize
from megabatch.data.pipeline.normalise import Normalise
from megabatch.data.settings import MAX_PIXELS
from megabatch.data.sources.files import Content
from megabatch.errors import UserError
from megabatch.io.reading import read_file
from megabatch.io.tensor_header import Entry
from megabatch.models.catalog import ModelSettings, build_model, model_errors, require_named
from megabatch.precision.cast import place_model
from megabatch.precision.policy import PrecisionSettings
from megabatch.runs.model_card import ModelCard
from megabatch.text import expand_home
from megabatch.training.checkpoint.card import pixels_of
from megabatch.training.checkpoint.format import DTYPES
from megabatch.training.checkpoint.weights import SavedWeights, find_weights

Picture = Image.Image | torch.Tensor | str | Path


def load(
    run: str | Path,
    checkpoint: str | None = None,
    *,
    device: str = "cpu",
    network: nn.Module | None = None,
    model: str | None = None,
) -> "Classifier":
    """Load the model of a run.

    Args:
        run: The run's folder, or its model.safetensors.
        checkpoint: The name of a checkpoint, such as "best" or "last"; by default the final weights.
        device: The device to load the model to.
        network: The network to load the weights into. A model that was trained by `fit` needs it.
        model: The name of the model, "package.module:factory", if it is custom Python code. The name in the file is
            not used, because a file must not decide which code is imported and run.

    Returns:
        A module that maps images to scores and prepares them exactly as evaluation does.

    Raises:
        UserError: There is no such run or checkpoint, its weights do not fit the network, or `model` or `network` is
            required.

    Examples:
        >>> classifier = megabatch.load("runs/photos-001")
        >>> scores = classifier([Image.open("a.jpg"), Image.open("b.png")])
        >>> scores.shape == (2, len(classifier.classes))
        True
    """
    return make_classifier(find_weights(Path(expand_home(run)), checkpoint), torch.device(device), network, model)


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
        if not settings.is_user_model:
            with NotInitialised(), torch.device("meta"):  # before allocating the sizes that the card states
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
    """Mode that skips `normal_` on meta tensors, which have no values; torch would import for seconds first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.normal_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def settings_of(weights: SavedWeights) -> ModelSettings:
    given = {key: value for key, value in weights.card.model.items() if value is not None}
    try:
        return msgspec.convert(given, ModelSettings)
    except msgspec.ValidationError as error:
        raise UserError(f"{weights.path} does not name a valid model ({error}); train it again") from None


def build(settings: ModelSettings, card: ModelCard) -> nn.Module:
    return build_model(settings, 0, len(card.classes), card.num_channels, card.image_size)


def require_fit(weights: SavedWeights, layout: dict[str, Entry], model: nn.Module) -> None:
    """Check shapes and kinds of numbers: torch would silently convert an int8 to a weight."""
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or name not in layout:  # load_state_dict reports it
            continue
        entry = layout[name]
        dtype = DTYPES[entry.dtype]
        is_other = dtype.is_complex or (tensor.is_floating_point() and not dtype.is_floating_point)
        if list(tensor.shape) != entry.shape or is_other:
            raise UserError(
                f"{weights.path} does not fit {weights.card.model['name']}: {name} is {entry} in the file but "
                f"{tensor.dtype} {list(tensor.shape)} in the model; give the network of the run"
            )


class Classifier(nn.Module):
    """A trained network with its image preparation.

    `megabatch.load` makes it. Scores have no gradients; for gradients, call `network` and `normalise`.

    Args:
        network: The trained network. It is put into evaluation mode and stays there.
        normalise: The conversion of uint8 images to the network's input.
        card: The metadata of the weights file, such as classes and image size.
        settings: The model's settings.

    Examples:
        >>> classifier = megabatch.load("runs/photos-001")
        >>> scores = classifier("a.jpg")
        >>> classifier.classes[scores[0].argmax()] in classifier.classes
        True
    """

    def __init__(self, network: nn.Module, normalise: Normalise, card: ModelCard, settings: ModelSettings) -> None:
        super().__init__()
        self.network, self.normalise, self.card, self.settings = network.eval(), normalise, card, settings
        self.classes = tuple(card.classes)
        self.image_size, self.num_channels = card.test_image_size, card.num_channels

    @torch.no_grad()
    def forward(self, images: Picture | Sequence[Picture]) -> torch.Tensor:
        """Return the scores of images, before softmax.

        Args:
            images: A PIL image, the path of a file, a uint8 tensor [C, H, W] or [N, C, H, W], or a list of these.

        Returns:
            Scores [N, classes] in fp32.

        Raises:
            UserError: An image cannot be read, or it is not of one of these types and shapes.
        """
        prepared = self.prepare(images)
        with model_errors(self.settings, prepared.shape):  # a card may state images too small for the network
            return self.network(self.normalise(prepared)).float()  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> "Classifier":
        """Stay in evaluation mode."""
        return super().train(False)

    def prepare(self, images: Picture | Sequence[Picture]) -> torch.Tensor:
        """Return images as evaluation sees them: uint8 [N, C, S, S]."""
        if isinstance(images, torch.Tensor) and images.ndim == 4:
            images = list(images)
        elif isinstance(images, Picture):
            images = [images]
        if not isinstance(images, Sequence):
            raise UserError(f"images are of type {type(images).__name__}; expected an image, a path or a list of these")
        if not images:
            return torch.empty(0, self.num_channels, self.image_size, self.image_size, dtype=torch.uint8)
        return torch.stack([self.prepare_one(image) for image in images])

    def prepare_one(self, image: Picture) -> torch.Tensor:
        if isinstance(image, Image.Image):
            return self.prepare_picture(image)
        if isinstance(image, str | Path):
            return self.prepare_file(image)
        expected = f"uint8 [{self.num_channels}, H, W]"
        if not isinstance(image, torch.Tensor) or image.dtype != torch.uint8 or image.ndim != 3:
            found = f"{image.dtype} {list(image.shape)}" if isinstance(image, torch.Tensor) else type(image).__name__
            raise UserError(f"an image is {found}; expected a PIL image, a path or a tensor, {expected}")
        if image.shape[0] != self.num_channels:
            raise UserError(f"an image is {list(image.shape)}; expected {expected}")
        if image.shape[1:] == (self.image_size, self.image_size):
            return image
        colours = image.expand(3, -1, -1) if self.num_channels == 1 else image
        return self.crop(colours.permute(1, 2, 0).cpu().numpy())

    def prepare_picture(self, image: Image.Image) -> torch.Tensor:
        content = undecoded(image)
        if content is None:
            upright = ImageOps.exif_transpose(image) if self.card.exif_orientation else image
            return self.crop(np.asarray(eight_bits(upright).convert("RGB")))
        return self.decode(content, getattr(image, "filename", "") or "an image")

    def prepare_file(self, path: str | Path) -> torch.Tensor:
        try:
            content = read_file(Path(expand_home(path)))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}; give the path of an image") from None
        return self.decode(content, str(path))

    def decode(self, content: Content, name: str) -> torch.Tensor:
        try:
            turns = self.card.exif_orientation
            lines = decode_crop(content, self.box, self.image_size, MAX_PIXELS, turns=turns)
        except Unreadable as error:
            raise UserError(f"{name} cannot be read: {error}") from None
        return self.resized(lines)

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        return central_box(height, width, self.card.center_crop)

    def crop(self, pixels: Any) -> torch.Tensor:
        """Return the central square of pixels [H, W, 3], resized."""
        top, left, rows, columns = self.box(*pixels.shape[:2])
        return self.resized(np.ascontiguousarray(pixels[top : top + rows, left : left + columns]).reshape(rows, -1))

    def resized(self, lines: Any) -> torch.Tensor:
        out = torch.empty(3, self.image_size, self.image_size, dtype=torch.uint8)
        resize(lines, out)
        return grey(out) if self.num_channels == 1 else out


def undecoded(image: Image.Image) -> bytes | None:
    """Return the bytes of a file that Pillow opened but did not decode, for the decoder of evaluation."""
    file = getattr(image, "fp", None)
    if file is None or getattr(image, "_im", None) is not None or getattr(image, "n_frames", 1) > 1:
        return None
    try:
        file.seek(0)
        return bytes(file.read())
    except (OSError, ValueError, io.UnsupportedOperation):
        return None


def grey(colours: torch.Tensor) -> torch.Tensor:
    """Convert [..., 3, H, W] to [..., 1, H, W] as Pillow's mode L does."""
    red, green, blue = colours.to(torch.int32).unbind(-3)
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16).to(torch.uint8).unsqueeze(-3)
