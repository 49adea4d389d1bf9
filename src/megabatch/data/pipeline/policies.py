"""Policies of augmentation, which choose operations on an image, and these operations.

A policy maps uniform draws to steps, pairs of an operation and its value.  TrivialAugmentWide (Müller and Hutter 2021)
applies one operation of random strength.  RandAugment (Cubuk et al. 2020) applies `operations` of one strength: in
torchvision's form, or in timm's, in which an operation is skipped with a probability and its strength is normally
distributed.  Colour jitter applies up to four operations in random order.

Operations are Pillow's, so that pixels are those of torchvision's and timm's classes on Pillow images, given the same
draws.  torchvision's form interpolates bilinearly and fills with black, as torchvision's reference; timm's is bicubic
and fills with the mean pixel.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps, ImageStat

from megabatch.data.pipeline.images import PixelStatistics
from megabatch.data.pipeline.order import JITTER, JITTER_ORDER, POLICY, Samples, draw, draw_below
from megabatch.data.settings import MOST_TIMM, AugmentSettings
from megabatch.errors import UserError

BINS = 31  # strengths of torchvision's policies
ORDERS = list(permutations(range(4)))
BLACK = (0, 0, 0)


class PolicyStep(NamedTuple):
    operation: str
    value: float = 0.0


class Look(NamedTuple):
    """How an operation fills the pixels that it moves into the image."""

    resample: Image.Resampling
    fill: tuple[int, ...]  # per channel


class Draws(NamedTuple):
    """Uniform draws from 0 to 1 for one operation."""

    operation: float
    strength: float  # torchvision: the bin of the strength; timm: whether the operation is applied
    radius: float  # this and the next: a normally distributed number, by Box and Muller
    angle: float
    sign: float

    def signed(self, value: float) -> float:
        return -value if self.sign < 0.5 else value


# Operations


def blend_levels(picture: Image.Image, level: int, factor: float) -> Image.Image:
    """Blend with a constant: as ImageEnhance, but in a table of 256 levels, which is several times as fast."""
    ramp = Image.frombytes("L", (256, 1), bytes(range(256)))
    levels = Image.blend(Image.new("L", (256, 1), level), ramp, factor)
    return picture.point(list(levels.tobytes()) * len(picture.getbands()))


def contrast(picture: Image.Image, factor: float, look: Look) -> Image.Image:
    grey = picture if picture.mode == "L" else picture.convert("L")
    return blend_levels(picture, int(ImageStat.Stat(grey).mean[0] + 0.5), factor)


def posterize(picture: Image.Image, bits: float, look: Look) -> Image.Image:
    """Keep the upper bits.  Unlike ImageOps.posterize, allow 0 bits, which timm's strongest posterizing keeps."""
    return picture.point([level >> 8 - int(bits) << 8 - int(bits) for level in range(256)] * len(picture.getbands()))


def solarize_add(picture: Image.Image, amount: float, look: Look) -> Image.Image:
    levels = [min(255, level + int(amount)) if level < 128 else level for level in range(256)]
    return picture.point(levels * len(picture.getbands()))


def hue(picture: Image.Image, share: float, look: Look) -> Image.Image:
    """Rotate the hue by a share of a turn.  A grey image has none."""
    if picture.mode == "L":
        return picture
    hues, saturations, values = picture.convert("HSV").split()
    turned = hues.point([(level + int(share * 255)) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturations, values)).convert("RGB")


def warp(picture: Image.Image, matrix: tuple[float, ...], look: Look) -> Image.Image:
    """Fill each pixel (x, y) from (a x + b y + c, d x + e y + f)."""
    is_copy = matrix[:2] == (1, 0) and matrix[3:5] == (0, 1) and matrix[2] % 1 == matrix[5] % 1 == 0
    resample = Image.Resampling.NEAREST if is_copy else look.resample  # the same pixels, in a fifth of the time
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample, fillcolor=fill_for(picture, look))


def rotate(picture: Image.Image, degrees: float, look: Look) -> Image.Image:
    return picture.rotate(degrees, look.resample, fillcolor=fill_for(picture, look))


def fill_for(picture: Image.Image, look: Look) -> int | tuple[int, ...]:
    return look.fill[0] if picture.mode == "L" else look.fill


OPERATIONS: dict[str, Callable[[Image.Image, float, Look], Image.Image]] = {
    "identity": lambda picture, value, look: picture,
    "autocontrast": lambda picture, value, look: ImageOps.autocontrast(picture),
    "equalize": lambda picture, value, look: ImageOps.equalize(picture),
    "invert": lambda picture, value, look: ImageOps.invert(picture),
    "posterize": posterize,
    "solarize": lambda picture, threshold, look: ImageOps.solarize(picture, threshold),  # type: ignore[arg-type]
    "solarize_add": solarize_add,
    "brightness": lambda picture, factor, look: blend_levels(picture, 0, factor),
    "contrast": contrast,
    "color": lambda picture, factor, look: ImageEnhance.Color(picture).enhance(factor),
    "sharpness": lambda picture, factor, look: ImageEnhance.Sharpness(picture).enhance(factor),
    "hue": hue,
    "rotate": rotate,
    "shear_x": lambda picture, factor, look: warp(picture, (1, factor, 0, 0, 1, 0), look),
    "shear_y": lambda picture, factor, look: warp(picture, (1, 0, 0, factor, 1, 0), look),
    "translate_x": lambda picture, pixels, look: warp(picture, (1, 0, -pixels, 0, 1, 0), look),
    "translate_y": lambda picture, pixels, look: warp(picture, (1, 0, 0, 0, 1, -pixels), look),
}


def apply_steps(picture: Image.Image, steps: Sequence[PolicyStep], look: Look) -> Image.Image:
    for operation, value in steps:
        picture = OPERATIONS[operation](picture, value, look)
    return picture


# Policies.  The order of the operations is that of the original, so that equal draws choose the same.


class Strengths(NamedTuple):
    """The largest value of each kind of operation in a policy of torchvision."""

    shear: float
    shift_x: float  # pixels
    shift_y: float
    degrees: float
    enhancement: float
    bits: int  # that posterizing removes


TORCHVISION = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast"),
    *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
SHIFT = 150 / 331  # the largest shift of RandAugment, as a share of the side
TIMM = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color", "contrast"),
    *("brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
TIMM_SHIFT = 0.45


@lru_cache(maxsize=1024)
def strengths_up_to(most: float) -> list[float]:
    values: list[float] = torch.linspace(0.0, most, BINS).tolist()  # rounded to fp32, as in torchvision
    return values


def torchvision_step(draws: Draws, strength: int, most: Strengths) -> PolicyStep:
    operation = TORCHVISION[int(draws.operation * len(TORCHVISION))]
    match operation:
        case "shear_x" | "shear_y":
            return PolicyStep(operation, draws.signed(strengths_up_to(most.shear)[strength]))
        case "translate_x":
            return PolicyStep(operation, int(draws.signed(strengths_up_to(most.shift_x)[strength])))
        case "translate_y":
            return PolicyStep(operation, int(draws.signed(strengths_up_to(most.shift_y)[strength])))
        case "rotate":
            return PolicyStep(operation, draws.signed(strengths_up_to(most.degrees)[strength]))
        case "brightness" | "color" | "contrast" | "sharpness":
            return PolicyStep(operation, 1.0 + draws.signed(strengths_up_to(most.enhancement)[strength]))
        case "posterize":
            return PolicyStep(operation, 8 - round(strength * most.bits / (BINS - 1)))
        case "solarize":
            return PolicyStep(operation, 255.0 * strengths_up_to(1.0)[BINS - 1 - strength])
    return PolicyStep(operation)


def trivial_augment_wide(
    settings: AugmentSettings, draws: Sequence[Draws], height: int, width: int
) -> list[PolicyStep]:
    most = Strengths(shear=0.99, shift_x=32, shift_y=32, degrees=135, enhancement=0.99, bits=6)
    return [torchvision_step(draws[0], int(draws[0].strength * BINS), most)]


def rand_augment(settings: AugmentSettings, draws: Sequence[Draws], height: int, width: int) -> list[PolicyStep]:
    most = Strengths(shear=0.3, shift_x=SHIFT * width, shift_y=SHIFT * height, degrees=30, enhancement=0.9, bits=4)
    return [torchvision_step(each, settings.magnitude, most) for each in draws]


def rand_augment_timm(settings: AugmentSettings, draws: Sequence[Draws], height: int, width: int) -> list[PolicyStep]:
    steps = []
    for each in draws:
        if each.strength < settings.probability:
            normal = math.sqrt(-2 * math.log(1 - each.radius)) * math.cos(2 * math.pi * each.angle)
            magnitude = min(max(settings.magnitude + settings.magnitude_std * normal, 0.0), MOST_TIMM)
            steps.append(timm_step(each, magnitude / MOST_TIMM, settings.increasing, height, width))
    return steps


def timm_step(draws: Draws, strength: float, increasing: bool, height: int, width: int) -> PolicyStep:
    """Return the step of a strength from 0 to 1.  With `increasing`, 0 is the weakest of every operation."""
    operation = TIMM[int(draws.operation * len(TIMM))]
    match operation:
        case "rotate":
            return PolicyStep(operation, draws.signed(strength * 30))
        case "posterize":
            return PolicyStep(operation, 4 - int(strength * 4) if increasing else int(strength * 4))
        case "solarize":
            return PolicyStep(operation, 256 - int(strength * 256) if increasing else int(strength * 256))
        case "solarize_add":
            return PolicyStep(operation, int(strength * 110))
        case "color" | "contrast" | "brightness" | "sharpness":
            factor = max(0.1, 1.0 + draws.signed(strength * 0.9)) if increasing else strength * 1.8 + 0.1
            return PolicyStep(operation, factor)
        case "shear_x" | "shear_y":
            return PolicyStep(operation, draws.signed(strength * 0.3))
        case "translate_x":
            return PolicyStep(operation, -draws.signed(strength * TIMM_SHIFT) * width)
        case "translate_y":
            return PolicyStep(operation, -draws.signed(strength * TIMM_SHIFT) * height)
    return PolicyStep(operation)


POLICIES: dict[str, Callable[[AugmentSettings, Sequence[Draws], int, int], list[PolicyStep]]] = {
    "trivial_augment_wide": trivial_augment_wide,
    "rand_augment": rand_augment,
    "rand_augment_timm": rand_augment_timm,
}


def colour_jitter(settings: AugmentSettings, factors: Sequence[float], order: int) -> list[PolicyStep]:
    """Return the steps of colour jitter, given four draws from 0 to 1 and the number of an order."""
    spans = {
        "brightness": settings.brightness,
        "contrast": settings.contrast,
        "color": settings.saturation,
        "hue": settings.hue,
    }
    steps = []
    for number in ORDERS[order]:
        operation, span = list(spans.items())[number]
        if span:
            centre = 0.0 if operation == "hue" else 1.0
            lowest = -span if operation == "hue" else max(0.0, centre - span)
            steps.append(PolicyStep(operation, lowest + factors[number] * (centre + span - lowest)))
    return steps


def require_colours(settings: AugmentSettings, num_channels: int) -> None:
    if settings.recolours and num_channels not in (1, 3):
        key = "policy" if settings.policy != "none" else "brightness (contrast, saturation, hue)"
        raise UserError(f"data.augment.{key} needs images of 1 or 3 channels, but these have {num_channels}; omit it")


class Recolouring:
    """The steps of the policy and of the colour jitter for some samples, each in its epoch."""

    def __init__(
        self, settings: AugmentSettings, seed: int, samples: Samples, epochs: Samples, pixels: PixelStatistics | None
    ) -> None:
        self.settings, self.policy = settings, POLICIES.get(settings.policy)
        self.look = Look(Image.Resampling.BILINEAR, BLACK)
        if settings.policy == "rand_augment_timm":
            assert pixels
            self.look = Look(Image.Resampling.BICUBIC, tuple(round(value) for value in pixels.mean))
        # [sample][stream][word]; lists, because numpy scalars take five times as long.
        self.draws = uniform(seed, POLICY + np.arange(2 * settings.operations), samples, epochs) if self.policy else []
        self.factors = uniform(seed, np.array([JITTER]), samples, epochs) if settings.jitters else []
        self.orders = draw_below(len(ORDERS), draw(seed, JITTER_ORDER, samples, epochs)[0])

    def steps(self, which: int, height: int, width: int) -> list[PolicyStep]:
        steps = []
        if self.policy:
            words = self.draws[which]
            draws = [Draws._make([*first, second[0]]) for first, second in zip(words[::2], words[1::2], strict=True)]
            steps += self.policy(self.settings, draws, height, width)
        if self.factors:
            steps += colour_jitter(self.settings, self.factors[which][0], int(self.orders[which]))
        return steps

    def change(self, which: int, image: torch.Tensor) -> None:
        """Apply the steps to an image, uint8 [1 or 3, H, W], in place."""
        pixels = image.permute(1, 2, 0).numpy()
        steps = self.steps(which, *pixels.shape[:2])
        if steps:
            picture = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
            pixels[...] = np.asarray(apply_steps(picture, steps, self.look)).reshape(pixels.shape)


def uniform(seed: int, streams: Samples, samples: Samples, epochs: Samples) -> list[list[list[float]]]:
    """Return four draws from 0 to 1 of each stream for every sample, [sample][stream][4]."""
    words = np.stack(draw(seed, streams[:, None], samples, epochs), axis=-1) * 2.0**-32
    draws: list[list[list[float]]] = words.swapaxes(0, 1).tolist()
    return draws
