from pathlib import Path

import numpy as np
import pytest
import torch

from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline import normalise
from megabatch.data.pipeline.images import ArrayImages
from megabatch.data.pipeline.normalise import Normalise, measure_pixels
from megabatch.data.settings import DataSettings
from megabatch.errors import UserError
from tests.support.photos import make_folder

CPU = torch.device("cpu")


def unlabelled(pixels: torch.Tensor) -> ArrayImages:
    return ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))


def test_normalised_images_have_zero_mean_and_unit_deviation() -> None:
    pixels = torch.randint(0, 200, (2300, 3, 8, 8), dtype=torch.uint8)
    pixels[:, 1] = 7  # a channel without variation
    result = Normalise(measure_pixels(unlabelled(pixels)), CPU, torch.float64)(pixels)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    deviations = result.std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), atol=1e-9, rtol=0)


def test_statistics_match_numpy() -> None:
    pixels = torch.randint(0, 256, (300, 2, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    statistics = measure_pixels(unlabelled(pixels))
    values = pixels.numpy().astype(np.float64).swapaxes(0, 1).reshape(2, -1)
    np.testing.assert_allclose(statistics.mean, values.mean(1), rtol=1e-14)
    np.testing.assert_allclose(statistics.deviation, values.std(1), rtol=1e-12)


def test_black_and_white_pixels_become_minus_one_and_one() -> None:
    pixels = torch.tensor([0, 200], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    for dtype in (torch.float32, torch.bfloat16):
        result = Normalise(measure_pixels(unlabelled(pixels.contiguous())), CPU, dtype, channels_last=True)(pixels)
        assert result.dtype == dtype and result.is_contiguous(memory_format=torch.channels_last)
        assert (result[0] == -1).all() and (result[1] == 1).all()


def test_a_large_set_is_sampled_over_its_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set may be sorted by class; this one is sorted by brightness."""
    monkeypatch.setattr(normalise, "MEASURED_SAMPLES", 20)
    pixels = torch.arange(200, dtype=torch.uint8).view(200, 1, 1, 1).expand(200, 1, 8, 8).contiguous()
    (mean,) = measure_pixels(unlabelled(pixels)).mean
    assert abs(mean - 99.5) < 10


def test_a_set_without_statistics_is_refused_with_a_reason(tmp_path: Path) -> None:
    pixels = torch.zeros(9, 1, 8, 8)
    pixels[4, 0, 1, 1] = torch.inf
    with pytest.raises(UserError, match="image 4 of the training set is not finite"):
        measure_pixels(unlabelled(pixels))
    folder = make_folder(tmp_path / "photos", per_class=3)
    for path in folder.rglob("*.jpg"):
        path.write_bytes(b"text")
    data = load_data_set(DataSettings(source=str(folder), image_size=8, validation=0.3, on_error="skip"))
    with pytest.raises(UserError, match="none of 6 training images can be read"):
        measure_pixels(data.train)
