from typing import Any

import numpy as np
import torch
from PIL import Image

from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.order import AUGMENT, Samples, draw, draw_below
from megabatch.data.settings import DataSettings

IMAGES = torch.randint(1, 256, (40, 3, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SAMPLES, EPOCHS = np.arange(100, 140), np.full(40, 2)


def augment(
    images: torch.Tensor, seed: int, epochs: Samples, samples: Samples, padding: int, flip: bool, **more: Any
) -> torch.Tensor:
    settings = DataSettings(source="", image_size=8, crop_padding=padding, flip=flip, **more)
    return Augmentation(settings, seed, samples, epochs).change(images)


def test_reflected_padding_is_that_of_numpy() -> None:
    got = augment(IMAGES.clone(), 5, EPOCHS, SAMPLES, 3, flip=False, padding_mode="reflect").numpy()
    for sample, image, result in zip(SAMPLES, IMAGES.numpy(), got, strict=True):
        down, right, *_ = draw(5, AUGMENT, sample, 2)
        row, column = (int(draw_below(7, words)) for words in (down, right))
        padded = np.pad(image, ((0, 0), (3, 3), (3, 3)), mode="reflect")
        assert np.array_equal(result, padded[:, row : row + 9, column : column + 9])


def augment_one(image: np.ndarray, seed: int, epoch: int, sample: int, padding: int, flip: bool) -> np.ndarray:
    """Augment one image without torch."""
    down, right, mirrored, _ = draw(seed, AUGMENT, [sample], [epoch])
    row, column = (int(draw_below(2 * padding + 1, words)[0]) for words in (down, right))
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    cropped = padded[:, row : row + image.shape[1], column : column + image.shape[2]]
    return cropped[:, :, ::-1] if flip and int(mirrored[0]) >= 2**31 else cropped


def test_every_image_is_cropped_and_flipped_by_its_counter() -> None:
    for padding, flip in ((0, False), (2, False), (0, True), (3, True)):
        got = augment(IMAGES.clone(), 5, EPOCHS, SAMPLES, padding, flip).numpy()
        for image, result, sample in zip(IMAGES.numpy(), got, SAMPLES, strict=True):
            assert np.array_equal(result, augment_one(image, 5, 2, int(sample), padding, flip))


def test_augmentation_does_not_depend_on_the_rest_of_the_batch() -> None:
    whole = augment(IMAGES.clone(), 5, EPOCHS, SAMPLES, 2, True)
    order = np.random.default_rng(0).permutation(40)[:7]
    part = augment(IMAGES[order], 5, EPOCHS[order], SAMPLES[order], 2, True)
    assert torch.equal(part, whole[order])


def test_epochs_have_different_crops() -> None:
    first, second = (augment(IMAGES.clone(), 5, np.full(40, epoch), SAMPLES, 2, True) for epoch in (0, 1))
    assert (first != second).flatten(1).any(1).sum() > 30


def test_all_crops_and_both_flips_occur_evenly() -> None:
    marker = torch.zeros(5000, 1, 3, 3, dtype=torch.uint8)
    marker[:, 0, 1, 2] = 1  # right of the centre
    got = augment(marker, 1, np.zeros(5000, int), np.arange(5000), 1, True)
    counts = got.sum(0).flatten().numpy()
    # The marker is in any of three rows; its column is cropped away, right or centre, and mirrored half of the time.
    expected = 5000 / 3 * np.array([1 / 6, 1 / 3, 1 / 6] * 3)
    assert abs(counts - expected).max() < 5 * np.sqrt(expected.max())


def test_one_image_is_augmented_as_in_a_batch() -> None:
    settings = DataSettings(source="", image_size=9, crop_padding=2, flip=True)
    augmentation = Augmentation(settings, 5, SAMPLES, EPOCHS)
    together, alone = augmentation.change(IMAGES.clone()), IMAGES.clone()
    for which, images in enumerate(alone.split(1)):
        augmentation.pad(which, images)
    assert torch.equal(together, alone)


def test_images_in_memory_get_random_crops() -> None:
    settings = DataSettings(source="", image_size=9, crop_area=0.2)
    augmentation = Augmentation(settings, 5, SAMPLES, EPOCHS)
    assert augmentation.crops is not None
    for which, (image, result) in enumerate(zip(IMAGES, augmentation.change(IMAGES.clone()), strict=True)):
        top, left, height, width = augmentation.crops.box(which, 9, 9)
        photo = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + width, top + height))
        reference = np.asarray(photo.resize((9, 9), Image.Resampling.BILINEAR)).astype(int)
        assert abs(result.permute(1, 2, 0).numpy().astype(int) - reference).max() <= 1
