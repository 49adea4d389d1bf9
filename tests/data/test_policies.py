"""Policies, colour jitter and random erasing: those of torchvision's and timm's classes, given the same draws."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

from megabatch.data.pipeline.augment import Augmentation, Erasing
from megabatch.data.pipeline.images import PixelStatistics
from megabatch.data.pipeline.order import BOX, draw
from megabatch.data.pipeline.policies import (
    OPERATIONS,
    ORDERS,
    POLICIES,
    TIMM,
    TORCHVISION,
    Draws,
    Recolouring,
    require_colours,
)
from megabatch.data.settings import AugmentSettings, DataSettings
from megabatch.errors import UserError

COUNT = 400
SAMPLES, EPOCHS = np.arange(COUNT), np.full(COUNT, 3)
PIXELS = PixelStatistics((124.4, 90.0, 60.6), (58.0, 50.0, 40.0))
GREY_PIXELS = PixelStatistics((90.4,), (50.0,))
WIDTH, HEIGHT = 26, 20


def picture(mode: str) -> Image.Image:
    """Return an image with edges, gradients and few levels near 0 and 255."""
    coarse = np.random.default_rng(0).integers(10, 240, (6, 7, 3), np.uint8)
    return Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).convert(mode)


def recolouring(mode: str = "RGB", **settings: Any) -> Recolouring:
    return Recolouring(AugmentSettings(**settings), 5, SAMPLES, EPOCHS, PIXELS if mode == "RGB" else GREY_PIXELS)


def changed(ours: Recolouring, which: int, before: Image.Image) -> np.ndarray:
    pixels = np.array(before)
    image = torch.from_numpy(pixels)[None] if pixels.ndim == 2 else torch.from_numpy(pixels).permute(2, 0, 1)
    ours.change(which, image)
    return pixels


def draws_of(ours: Recolouring, which: int) -> list[Draws]:
    words = ours.draws[which]
    return [Draws._make([*words[2 * number], words[2 * number + 1][0]]) for number in range(len(words) // 2)]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("name", "policy", "settings"),
    [
        ("TrivialAugmentWide", "trivial_augment_wide", {}),
        ("RandAugment", "rand_augment", {"operations": 3, "magnitude": 11}),
    ],
)
def test_policies_of_torchvision_change_the_same_pixels(
    torchvision: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    name: str,
    policy: str,
    settings: dict[str, int],
) -> None:
    from torchvision.transforms import v2

    ours, before = recolouring(mode, policy=policy, **settings), picture(mode)
    names = {"num_ops": "operations", "magnitude": "magnitude"}
    options = {theirs: settings[mine] for theirs, mine in names.items() if mine in settings}
    theirs = getattr(v2, name)(interpolation=v2.InterpolationMode.BILINEAR, **options)
    current: list[Draws] = []

    def randint(limit: int, size: tuple[()]) -> torch.Tensor:
        if limit == len(TORCHVISION):
            current.append(next(given))
        uniform = current[-1].operation if limit == len(TORCHVISION) else current[-1].strength
        return torch.tensor(int(uniform * limit))

    monkeypatch.setattr(torch, "randint", randint)
    monkeypatch.setattr(torch, "rand", lambda size: torch.tensor(current[-1].sign, dtype=torch.float64))
    num_changed = 0
    for which in range(COUNT):
        given = iter(draws_of(ours, which))
        expected = np.asarray(theirs(before))
        assert np.array_equal(changed(ours, which, before), expected), ours.steps(which, HEIGHT, WIDTH)
        num_changed += not np.array_equal(expected, np.asarray(before))
    assert num_changed > 0.7 * COUNT
    used = Counter(step.operation for which in range(COUNT) for step in ours.steps(which, HEIGHT, WIDTH))
    assert set(used) == set(TORCHVISION)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(("config", "increasing"), [("rand-m7-n2-mstd0.5-inc1", True), ("rand-m5-n3-p0.8", False)])
def test_policy_of_timm_changes_the_same_pixels(
    torchvision: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str, config: str, increasing: bool
) -> None:
    from timm.data.auto_augment import rand_augment_transform

    settings: dict[str, Any] = (
        {"magnitude": 7, "magnitude_std": 0.5} if increasing else {"magnitude": 5, "operations": 3, "probability": 0.8}
    )
    ours = recolouring(mode, policy="rand_augment_timm", increasing=increasing, **settings)
    fill = tuple(round(value) for value in (PIXELS if mode == "RGB" else GREY_PIXELS).mean)
    theirs = rand_augment_transform(config, {"img_mean": fill, "interpolation": Image.Resampling.BICUBIC})
    before = picture(mode)
    for which in range(COUNT):
        draws = draws_of(ours, which)
        chosen = [theirs.ops[int(each.operation * len(TIMM))] for each in draws]
        uniforms, normals = [], []
        signed = ("Rotate", "Color", "Contrast", "Brightness", "Sharpness", "Shear", "Translate")
        for each, op in zip(draws, chosen, strict=True):
            uniforms.append(each.strength)
            if each.strength <= op.prob:
                normals.append(math.sqrt(-2 * math.log(1 - each.radius)) * math.cos(2 * math.pi * each.angle))
                is_enhanced = op.name in ("Color", "Contrast", "Brightness", "Sharpness")
                uniforms += [1 - each.sign] if op.name.startswith(signed) and not is_enhanced else []
        given, normal = iter(uniforms), iter(normals)
        monkeypatch.setattr(np.random, "choice", lambda ops, count, replace, p, chosen=chosen: chosen)
        monkeypatch.setattr(random, "random", lambda given=given: next(given))
        monkeypatch.setattr(random, "gauss", lambda mean, std, normal=normal: mean + std * next(normal))
        expected = np.asarray(theirs(before))
        assert next(given, None) is None
        assert np.array_equal(changed(ours, which, before), expected), ours.steps(which, HEIGHT, WIDTH)


def test_strengths_of_timm_are_normal_and_limited() -> None:
    ours = recolouring(policy="rand_augment_timm", magnitude=5, magnitude_std=1.5, probability=1.0, operations=4)
    steps = [step for which in range(COUNT) for step in ours.steps(which, HEIGHT, WIDTH)]
    degrees = np.array([abs(step.value) / 3 for step in steps if step.operation == "rotate"])
    assert len(degrees) > 60 and abs(degrees.mean() - 5) < 0.8 and 1.0 < degrees.std() < 2.0
    strongest = recolouring(policy="rand_augment_timm", magnitude=10, magnitude_std=9.0, increasing=True)
    kept = [changed(strongest, which, picture("RGB")) for which in range(COUNT)]  # posterizing may keep no bits
    assert len(kept) == COUNT


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_colour_jitter_is_that_of_torchvision(torchvision: ModuleType, mode: str) -> None:
    from torchvision.transforms import v2

    ours, before = recolouring(mode, brightness=0.4, contrast=1.5, saturation=0.3, hue=0.2), picture(mode)
    theirs = v2.ColorJitter(brightness=0.4, contrast=1.5, saturation=0.3, hue=0.2)
    spans = [theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue]
    orders = set()
    for which in range(COUNT):
        factors = ours.factors[which][0]
        values = [low + uniform * (high - low) for uniform, (low, high) in zip(factors, spans, strict=True)]
        order = ORDERS[int(ours.orders[which])]
        names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
        params = dict(zip(names, values, strict=True)) | {"fn_idx": order}
        assert np.array_equal(changed(ours, which, before), np.asarray(theirs.transform(before, params)))
        orders.add(order)
    assert len(orders) == 24


def test_jitter_follows_the_policy_and_skips_factors_that_are_off() -> None:
    both = recolouring(policy="trivial_augment_wide", brightness=0.5)
    policy, jitter = recolouring(policy="trivial_augment_wide"), recolouring(brightness=0.5)
    for which in range(20):
        assert [step.operation for step in jitter.steps(which, 9, 9)] == ["brightness"]
        assert both.steps(which, 9, 9) == policy.steps(which, 9, 9) + jitter.steps(which, 9, 9)


def boxes_of(words: np.ndarray) -> Iterator[float]:
    """Yield the draws of ten attempts as timm draws them: a position only for a box that fits."""
    for area, ratio, top, left in words:
        yield from (area, ratio)
        area, ratio = (0.02 + 0.31 * area) * WIDTH * HEIGHT, 0.3 * 11**ratio
        if round(math.sqrt(area * ratio)) < HEIGHT and round(math.sqrt(area / ratio)) < WIDTH:
            yield from (top, left)


def test_the_mean_is_erased_in_the_box_of_timm(torchvision: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's RandomErasing draws the same, but from torch's generator."""
    from timm.data.random_erasing import RandomErasing

    theirs = RandomErasing(0.6, 0.02, 0.33, 0.3, 3.3, device="cpu")
    ours = Erasing(AugmentSettings(erase=0.6), 5, SAMPLES, EPOCHS, PIXELS)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (PIXELS.mean, PIXELS.deviation))
    before = torch.from_numpy(np.array(picture("RGB"))).permute(2, 0, 1)
    assert abs(np.mean(ours.chosen) - 0.6) < 0.1
    words = np.stack(draw(5, BOX + np.arange(10)[:, None], SAMPLES, EPOCHS), axis=-1) * 2.0**-32
    for which in range(COUNT):
        given = iter([0.0 if ours.chosen[which] else 1.0, *boxes_of(words[:, which])])
        monkeypatch.setattr(random, "random", lambda given=given: next(given))
        monkeypatch.setattr(random, "uniform", lambda low, high, given=given: low + (high - low) * next(given))
        monkeypatch.setattr(random, "randint", lambda low, high, given=given: int(next(given) * (high + 1)))
        expected = theirs(((before - mean) / deviation).clone()) * deviation + mean
        found = before.clone()
        ours.erase(which, found)
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.5001)
        assert torch.equal(found, before) != ours.chosen[which]


def test_noise_is_normal_and_a_function_of_the_sample() -> None:
    settings = AugmentSettings(erase=1.0, erase_with="noise")
    whole = Erasing(settings, 5, SAMPLES, EPOCHS, PIXELS)
    part = Erasing(settings, 5, SAMPLES[7:9], EPOCHS[7:9], PIXELS)
    erased, again = (torch.zeros(3, 90, 80, dtype=torch.uint8) for _ in range(2))
    whole.erase(7, erased)
    part.erase(0, again)
    assert torch.equal(erased, again)
    top, left, rows, columns = whole.box(7, 90, 80) or (0, 0, 0, 0)
    noise = erased[:, top : top + rows, left : left + columns].double()
    assert not erased[:, :top].any() and rows * columns > 100
    for channel, mean, deviation in zip(noise, PIXELS.mean, PIXELS.deviation, strict=True):
        assert abs(channel.mean() - mean) < 5 * deviation / math.sqrt(rows * columns) + 2  # clipping moves it
        assert 0.8 * deviation < channel.std() < 1.1 * deviation


@pytest.mark.parametrize("channels", [1, 3])
def test_whole_microbatches_are_changed_image_by_image(channels: int) -> None:
    augment = AugmentSettings(policy="rand_augment_timm", brightness=0.2, erase=0.5, erase_with="noise")
    settings = DataSettings(source="", image_size=9, crop_padding=2, flip="alternating", augment=augment)
    images = torch.randint(1, 256, (40, channels, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = PIXELS if channels == 3 else GREY_PIXELS
    augmentation = Augmentation(settings, 5, SAMPLES[:40], EPOCHS[:40], pixels=pixels)
    together, alone = augmentation.change(images.clone()), images.clone()
    for which, image in enumerate(alone.split(1)):
        augmentation.pad(which, image)
        augmentation.finish(which, image[0])
    assert torch.equal(together, alone) and not torch.equal(together, images)


def test_alternating_flips_change_with_every_epoch() -> None:
    settings = DataSettings(source="", image_size=9, flip="alternating")
    mirrored = [Augmentation(settings, 5, SAMPLES, np.full(COUNT, epoch)).mirrored for epoch in range(4)]
    assert np.array_equal(mirrored[0], mirrored[2]) and np.array_equal(mirrored[1], mirrored[3])
    assert np.array_equal(mirrored[0], ~mirrored[1]) and 0.4 < mirrored[0].mean() < 0.6


def test_every_policy_is_a_setting_and_refuses_settings_of_another() -> None:
    assert {"none", *POLICIES} == set(get_args(AugmentSettings.__annotations__["policy"]))
    assert {*TORCHVISION, *TIMM} <= set(OPERATIONS)
    invalid: list[dict[str, Any]] = [
        {"policy": "rand_augment_timm", "magnitude": 11},
        {"policy": "rand_augment", "magnitude_std": 0.5},
        {"policy": "trivial_augment_wide", "increasing": True},
    ]
    for wrong in invalid:
        with pytest.raises(UserError, match=r"data\.augment\..*; "):
            AugmentSettings(**wrong)
    require_colours(AugmentSettings(erase=0.5), 2)
    with pytest.raises(UserError, match=r"data\.augment\.brightness.*1 or 3 channels.* 2; omit"):
        require_colours(AugmentSettings(hue=0.1), 2)
