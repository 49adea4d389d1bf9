from typing import Any

import pytest
import torch
from megabatch_lab.studies.fc6 import fc6_alone
from megabatch_lab.studies.lars_in_fp16 import LarsInFp16, norm, trust_ratio
from torch import nn

from megabatch.optim import LARS

SETTINGS: dict[str, Any] = {"lr": 2.0, "momentum": 0.9, "trust_coefficient": 0.01, "eps": 0.0}


def pair(gradient: float) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(1)
    weights = [torch.randn(8, 8).half().float(), torch.randn(8).half().float()]
    both = [nn.Parameter(weight.clone()) for weight in weights], [nn.Parameter(weight.clone()) for weight in weights]
    for parameters in both:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, gradient)
    return both


def groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": parameters[:1], "weight_decay": 1e-2},
        {"params": parameters[1:], "weight_decay": 0.0, "trust_ratio": False},
    ]


def test_without_overflow_or_underflow_it_equals_lars() -> None:
    wide, narrow = pair(gradient=0.25)
    lars, in_fp16 = LARS(groups(wide), **SETTINGS), LarsInFp16(groups(narrow), **SETTINGS)
    for _ in range(5):
        lars.step()
        in_fp16.step()
    for one, other in zip(wide, narrow, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2)
        assert torch.equal(other, other.half().float())


def test_norm_of_small_gradients_underflows() -> None:
    wide, narrow = pair(gradient=1e-4)
    before = narrow[0].detach().clone()
    LARS(wide[:1], **SETTINGS).step()
    LarsInFp16(narrow[:1], **SETTINGS).step()
    assert (wide[0] - before).norm().item() == pytest.approx(0.02 * before.norm().item(), rel=1e-3)
    assert (narrow[0] - before).norm().item() < 0.01 * before.norm().item()  # 2 g, of which most is rounded away


def test_optimizer_resumes_from_its_state() -> None:
    once, twice = pair(gradient=0.25)
    optimizer = LarsInFp16(groups(once), **SETTINGS)
    other = LarsInFp16(groups(twice), **SETTINGS)
    for _ in range(2):
        optimizer.step()
        other.step()
    again = LarsInFp16(groups(twice), **SETTINGS)
    again.load_state_dict(other.state_dict())
    optimizer.step()
    again.step()
    assert all(map(torch.equal, once, twice))


FC6, LARGEST_OF_TINY_CNN = 37_748_736, 50_176  # weights
ONE_PERCENT: dict[str, Any] = {"lr": 1.0, "momentum": 0.9, "trust_coefficient": 0.01, "eps": 0.0}


def layer(num_weights: int, gradient_norm: float) -> nn.Parameter:
    """Return weights like the initial ones of NVCaffe's fc6, with a gradient of equal elements."""
    parameter = nn.Parameter(torch.full((num_weights,), 0.005).half().float())
    parameter.grad = torch.full_like(parameter, gradient_norm / num_weights**0.5)
    return parameter


def moved(parameter: nn.Parameter) -> float:
    """Return the change as a share of the weights, which were all equal."""
    first, last = torch.aminmax(parameter.detach())
    assert first == last
    return abs(1 - first.item() / torch.tensor(0.005).half().item())


def test_larger_layers_lose_the_norm_of_larger_gradients_in_fp16() -> None:
    group = {"trust_ratio": True, "trust_coefficient": 0.01, "weight_decay": 0.0, "eps": 0.0}
    for num_weights, is_lost in ((FC6, True), (LARGEST_OF_TINY_CNN, False)):
        parameter = layer(num_weights, gradient_norm=0.5)
        assert parameter.grad is not None
        weight, gradient = parameter.detach().half(), parameter.grad.half()
        exact = 0.01 * 0.005 * num_weights**0.5 / 0.5
        assert (norm(gradient) == 0) == is_lost
        assert trust_ratio(group, weight, gradient).item() == (1.0 if is_lost else pytest.approx(exact, rel=1e-2))


def test_layer_as_large_as_fc6_stalls_in_fp16_and_trains_with_fp32_master_weights() -> None:
    parameter = layer(FC6, gradient_norm=0.005)
    optimizer = LarsInFp16([parameter], **ONE_PERCENT)
    for _ in range(2):
        optimizer.step()
        assert moved(parameter) == 0
    # With master weights, the gradient arrives scaled in fp16 and is unscaled in fp32.
    parameter = layer(FC6, gradient_norm=0.005)
    assert parameter.grad is not None
    parameter.grad = (1000 * parameter.grad).half().float() / 1000
    lars = LARS([parameter], **ONE_PERCENT)
    for step, share in enumerate(
        (0.01, 0.01 + 0.019 - 0.0001), start=1
    ):  # the second: 1 % of 0.99, and 0.9 of the first
        lars.step()
        assert moved(parameter) == pytest.approx(share, rel=1e-2), step


def test_study_trains_that_layer() -> None:
    with torch.device("meta"):
        network = fc6_alone(num_classes=10, in_channels=1)
        assert network(torch.empty(2, 1, 28, 28)).shape == (2, 10)
    assert network.get_parameter("fc6.weight").numel() == FC6
