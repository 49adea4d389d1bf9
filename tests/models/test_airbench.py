import math

import pytest
import torch
import torch.nn.functional as F

from megabatch.models.airbench import SMALLEST_VARIANCE, Whitening, airbench94

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
    group = airbench94(10, 3, widths=(32, 40, 40))[3]
    x = torch.randn(2, 32, 6, 6)
    torch.testing.assert_close(group.conv1(x)[:, :32], x)


@pytest.mark.parametrize("widths", [(64, 256, 256), (8, 16, 24)])
def test_output_is_divided_by_the_inputs_of_the_last_layer(widths: tuple[int, ...]) -> None:
    head = airbench94(10, 3, widths)[-1]
    assert math.isclose(head.weight.std().item(), 1.0, rel_tol=1e-5)
    x = torch.randn(4, widths[-1])
    torch.testing.assert_close(head(x), x @ head.weight.T / widths[-1])
