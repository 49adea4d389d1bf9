from typing import Any

import pytest
import torch
from torch import nn

from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.models.catalog import MODELS, ModelSettings, build_model, model_errors
from megabatch.models.layers import AverageTo
from megabatch.models.loss import LossSettings, summed_loss
from megabatch.models.small import Residual
from megabatch.precision.cast import place_model
from megabatch.precision.policy import PrecisionSettings


def custom_model(num_classes: int, image_size: int, hidden: int = 5) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(image_size**2, hidden), nn.Linear(hidden, num_classes))


class Viewing(nn.Module):
    """A network that calls view, as many do.  Between two convolutions the memory format matters."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(in_channels, 4, 3, padding=1), nn.Linear(4 * image_size**2, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.conv(images)
        return self.fc(features.view(len(features), -1))


def takes_nothing() -> nn.Module:
    return nn.Flatten()


def not_a_model(num_classes: int) -> int:
    return num_classes


def build(name: str, seed: int = 1, in_channels: int = 1, **options: object) -> nn.Module:
    settings = ModelSettings(name=name, options=options)
    return build_model(settings, seed, num_classes=10, in_channels=in_channels, image_size=28)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("channels", [1, 3])
def test_models_accept_images_of_any_size(name: str, channels: int) -> None:
    with torch.device("meta"):
        model = build(name, in_channels=channels)
        for size in (64, 224) if name.startswith("alexnet") else (28, 32, 64, 224):
            assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)


@pytest.mark.parametrize(("name", "expected"), [("small_resnet", 121_274), ("shallow_cnn", 204_602)])
def test_models_have_the_stated_number_of_parameters(name: str, expected: int) -> None:
    assert sum(parameter.numel() for parameter in build(name).parameters()) == expected


def test_weights_depend_only_on_the_seed() -> None:
    first = build("small_cnn", seed=1).state_dict()
    torch.rand(3)
    again, other = (build("small_cnn", seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["0.0.weight"], other["0.0.weight"])


def test_zero_gamma_branch_starts_as_zero() -> None:
    x = torch.rand(2, 4, 5, 5)
    assert torch.equal(Residual(4, zero_gamma=True)(x), x)
    assert not torch.equal(Residual(4, zero_gamma=False)(x), x)


def test_custom_factory_gets_the_arguments_it_names() -> None:
    model = build(f"{__name__}:custom_model", hidden=7)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 784 * 7 + 7 + 70 + 10


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no.such.module:net", {}, r"^model.name='no.such.module:net' cannot be imported \(.*\); install no, or "),
        (f"{__name__}:missing", {}, r"cannot be imported .*missing"),
        (f"{__name__}:not_a_model", {}, r"returned a int; it must return an nn.Module"),
        (f"{__name__}:__name__", {}, r"is a str; it must be a function"),
        ("small_cnn", {"widht": 3}, r"model.options.widht: small_cnn has no such option; nearest: model.options.width"),
        ("small_cnn", {"width": "abc"}, r"model.name='small_cnn' with model.options=.* fails: "),
        (":x", {}, r"model.name=':x' cannot be imported"),
        ("..x:net", {}, r"model.name='..x:net' cannot be imported"),
        (f"{__name__}:takes_nothing", {}, r"must take num_classes; it takes nothing"),
        (f"{__name__}:not_a_model", {"x": 3}, r"model.options.x: .* has no such option; it takes none"),
    ],
)
def test_invalid_model_is_a_one_line_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, **options)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("small_cnn", "auto", True),
        ("small_cnn", False, False),
        (f"{__name__}:Viewing", "auto", False),
        (f"{__name__}:Viewing", True, True),
    ],
)
def test_built_in_models_are_channels_last_and_custom_ones_on_request(name: str, given: Any, expected: bool) -> None:
    assert ModelSettings(name=name, channels_last=given).wants_channels_last == expected
    config = load_config("fashion", [f"model.name={name}", f"model.channels_last={str(given).lower()}"])
    assert config.model.wants_channels_last == expected


def test_view_that_channels_last_does_not_allow_is_a_one_line_error() -> None:
    settings = ModelSettings(name=f"{__name__}:Viewing", channels_last=True)
    model = build_model(settings, 1, num_classes=10, in_channels=3, image_size=28)
    place_model(model, PrecisionSettings(), torch.device("cpu"), settings.wants_channels_last)
    images = torch.zeros(2, 3, 28, 28).to(memory_format=torch.channels_last)
    expected = r"^model.channels_last=true: .*:Viewing takes a view .*; write x.flatten\(1\) or .* out$"
    with pytest.raises(UserError, match=expected) as refusal, model_errors(settings, images.shape):
        model(images)
    assert "\n" not in str(refusal.value)


def test_unknown_memory_format_is_rejected_with_the_known_ones() -> None:
    expected = r"^model.channels_last='fast': expected (true or false or auto|auto or true or false); for example model"
    with pytest.raises(UserError, match=expected):
        load_config("fashion", ["model.channels_last=fast"])


def test_loss_is_the_smoothed_cross_entropy_summed_over_samples() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor([2, 1])
    target = torch.full((2, 3), 0.3 / 3, dtype=torch.float64)
    target[torch.arange(2), labels] += 0.7
    expected = -(target * logits.log_softmax(1)).sum()
    torch.testing.assert_close(summed_loss(LossSettings(label_smoothing=0.3), logits, labels), expected)


@pytest.mark.usefixtures("torchvision")  # which timm imports
@pytest.mark.parametrize(("smoothing", "threshold"), [(0.0, None), (0.08, None), (0.08, 0.2)])
def test_bce_is_timms_summed_over_classes_and_samples(smoothing: float, threshold: float | None) -> None:
    from timm.loss import BinaryCrossEntropy

    logits, labels = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.randint(0, 5, (6,))
    settings = LossSettings(name="bce", label_smoothing=smoothing, target_threshold=threshold)
    theirs = BinaryCrossEntropy(smoothing, threshold, sum_classes=True)
    mixed = torch.tensor([[0.7, 0.3, 0, 0, 0], [0.15, 0.85, 0, 0, 0]], dtype=torch.float64)  # timm smooths these itself
    with_shares = summed_loss(LossSettings(name="bce", target_threshold=threshold), logits[:2], mixed)
    torch.testing.assert_close(with_shares, 2 * theirs(logits[:2], mixed))
    ours, theirs = summed_loss(settings, logits, labels), 6 * theirs(logits, labels)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)))


@pytest.mark.parametrize("size", [6, 7, 8, 14])
def test_pool_of_tiny_cnn_averages_as_in_torch(size: int) -> None:
    images = torch.randn(3, 5, size, size)
    assert torch.equal(AverageTo(7)(images), nn.functional.adaptive_avg_pool2d(images, 7))
