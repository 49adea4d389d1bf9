import pytest
from torch import nn

from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.optim.groups import parameter_groups
from megabatch.preflight.preview import activations_by_side, list_parameters, preview


@pytest.mark.parametrize("sides", [[8, 32], [32]])
def test_a_size_that_the_network_refuses_is_one_line(sides: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    config = load_config("smoke", ["data.image_size=32", "data.test_image_size=8", "batch.micro=4"])
    model = nn.Sequential(nn.MaxPool2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
    with pytest.raises(UserError, match=r"images \[4, 3, 8, 8\]: .*; change the size"):
        activations_by_side(config, model, 3, sides)
    assert not any(capfd.readouterr())


def test_every_parameter_is_listed_once_even_if_shared_or_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    groups = parameter_groups(model, weight_decay=0.1)
    rows = list_parameters(model, groups, has_trust_ratio=True)
    assert [(row.name, row.shape, row.group, row.weight_decay, row.trust_ratio) for row in rows] == [
        ("0.weight", (3, 3), "weights", 0.1, True),
        ("0.bias", (3,), "biases", 0.0, False),
        ("1.weight", (3,), "normalisation", 0.0, False),
        ("1.bias", (3,), "normalisation", 0.0, False),
        ("2.bias", (3,), "frozen", 0.0, False),
    ]
    assert not any(row.trust_ratio for row in list_parameters(model, groups, has_trust_ratio=False))


def test_length_is_judged_as_for_imagenet_if_the_images_are_missing() -> None:
    config = load_config("resnet50-imagenet-8k", ["data.source=nowhere", "train.epochs=30"], needs_source=False)
    seen = preview(config, num_ranks=8, needs_images=False)
    assert any("epochs are expected to reach 75.9%" in warning for warning in seen.findings.warnings)
    assert any("MLPerf" in reference for reference in seen.findings.references)
