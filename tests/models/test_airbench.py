import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model, plan_groups, plan_learning_rate, plan_run
from megabatch.data.sources.shapes import DataShape
from megabatch.models.airbench import SMALLEST_VARIANCE, Whitening, airbench94
from megabatch.optim.optimizers import follow_schedule, make_optimizer

PIXELS = torch.randint(0, 256, (30, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
PIXELS[:, :, 1:] = PIXELS[:, :, :-1] // 2 + PIXELS[:, :, 1:] // 2  # neighbours are correlated
MEAN, DEVIATION = (90.0, 120.0, 135.0), (60.0, 65.0, 70.0)


def normalised() -> torch.Tensor:
    mean, deviation = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (MEAN, DEVIATION))
    return (PIXELS - mean) / deviation


def test_whitening_filters_are_scaled_eigenvectors_of_patches() -> None:
    filters = Whitening(3).filters_for(PIXELS.split(7), MEAN, DEVIATION).flatten(1)
    patches = F.unfold(normalised(), 2).permute(0, 2, 1).flatten(0, 1)
    variances = torch.linalg.svdvals(patches).square().flip(0) / len(patches)
    outputs = patches @ filters[:12].T
    expected = torch.diag(variances / (variances + SMALLEST_VARIANCE))
    torch.testing.assert_close(outputs.T @ outputs / len(patches), expected)
    assert torch.equal(filters[12:], -filters[:12])


def test_whitening_filters_do_not_depend_on_the_batches() -> None:
    whole, split = (Whitening(3).filters_for(PIXELS.split(size), MEAN, DEVIATION) for size in (30, 4))
    assert torch.equal(whole, split)


def test_filters_of_the_first_layer_and_gamma_are_not_trained() -> None:
    frozen = {name for name, parameter in airbench94(10, 3).named_parameters() if not parameter.requires_grad}
    assert frozen == {"0.weight", *(f"{group}.norm{number}.weight" for group in (2, 3, 4) for number in (1, 2))}


def test_convolutions_start_as_the_identity_on_their_first_outputs() -> None:
    group: Any = airbench94(10, 3, widths=(32, 40, 40)).get_submodule("3")
    x = torch.randn(2, 32, 6, 6)
    torch.testing.assert_close(group.conv1(x)[:, :32], x)


@pytest.mark.parametrize("widths", [(64, 256, 256), (8, 16, 24)])
def test_output_is_divided_by_the_inputs_of_the_last_layer(widths: tuple[int, ...]) -> None:
    head: Any = airbench94(10, 3, widths).get_submodule("7")
    assert math.isclose(head.weight.std().item(), 1.0, rel_tol=1e-5)
    x = torch.randn(4, widths[-1])
    torch.testing.assert_close(head(x), x @ head.weight.T / widths[-1])


def test_recipe_takes_the_steps_of_the_published_optimizers() -> None:
    """The source sums the loss over the batch, and states weight decays divided by learning rates."""
    config = load_config("cifar10")
    shape = DataShape(num_train=50_000, num_test=10_000, num_classes=10, num_channels=3)
    plan, batch = plan_run(config, shape, num_ranks=2), 2_000
    optimizer = make_optimizer(plan_groups(config, make_model(config, shape)), config.optim)
    for step in (0, 10, 74, 75, 199):
        follow_schedule(optimizer, plan_learning_rate(config, plan), step, plan.num_steps)
        decayed, of_whitening = 1 - step / 200, max(0.0, 1 - step / 75)
        expected = {"2.conv1": (0.24 * decayed, 0.6, 0.0), "2.norm1": (0.053 * batch * decayed, 0.85, 2e-6 / 0.053)}
        expected |= {"0.bias": (0.053 * batch * of_whitening, 0.85, 2e-6 / 0.053)}
        expected |= {"7.weight": (0.67 * batch * decayed, 0.85, 2e-6 / 0.67)}
        for name, values in expected.items():
            (group,) = [group for group in optimizer.param_groups if group["param_names"][0].startswith(name)]
            found = (group["lr"], group["momentum"], group["weight_decay"])
            assert found == pytest.approx(values, rel=1e-3, abs=1e-9)
