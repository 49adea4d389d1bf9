import pytest
import torch
from torch import nn

from megabatch.optim import LARS
from megabatch.studies.lars_in_fp16 import LarsInFp16

SETTINGS = {"lr": 2.0, "momentum": 0.9, "trust_coefficient": 0.01, "eps": 0.0}


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


def test_where_nothing_leaves_fp16_it_is_lars() -> None:
    wide, narrow = pair(gradient=0.25)
    lars, in_fp16 = LARS(groups(wide), **SETTINGS), LarsInFp16(groups(narrow), **SETTINGS)
    for _ in range(5):
        lars.step()
        in_fp16.step()
    for one, other in zip(wide, narrow, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2)
        assert torch.equal(other, other.half().float())


def test_small_gradients_have_no_norm_and_so_no_trust_ratio() -> None:
    wide, narrow = pair(gradient=1e-4)
    before = narrow[0].detach().clone()
    LARS(wide[:1], **SETTINGS).step()
    LarsInFp16(narrow[:1], **SETTINGS).step()
    assert (wide[0] - before).norm().item() == pytest.approx(0.02 * before.norm().item(), rel=1e-3)
    assert (narrow[0] - before).norm().item() < 0.01 * before.norm().item()  # 2 g, of which most is rounded away


def test_it_resumes_from_its_state() -> None:
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
