import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch.optim import LAMB, parameter_groups
from megabatch.optim.momentum import ROW
from megabatch.optim.optimizers import set_learning_rate
from tests.support.optimizers import SAME, give_gradients, make_weights, random, take_steps

RATES = [0.01, 0.02, 0.0, 0.02, 0.005]
SETTINGS: dict[str, Any] = {"lr": 1.0, "betas": (0.8, 0.95), "eps": 1e-4}


@pytest.mark.usefixtures("torchvision")  # which timm imports
@pytest.mark.parametrize("foreach", [None, True])
def test_lamb_equals_timms_step_by_step_in_float64(foreach: bool | None) -> None:
    import timm.optim as timm

    weights, alone = make_weights(), nn.Parameter(random(7, seed=9))
    theirs, their_alone = copy.deepcopy(weights), copy.deepcopy(alone)
    without = {"weight_decay": 0.0, "trust_ratio": False}  # timm skips the trust ratio without decay
    mine = LAMB([{"params": weights, "weight_decay": 0.1}, {"params": [alone], **without}], **SETTINGS, foreach=foreach)
    groups = [{"params": theirs, "weight_decay": 0.1}, {"params": [their_alone], "weight_decay": 0.0}]
    others = timm.Lamb(groups, **SETTINGS, max_grad_norm=None)
    for step, rate in enumerate(RATES):
        take_steps(mine, [rate], first=step)
        take_steps(others, [rate], first=step)
        for one, other in zip([*weights, alone], [*theirs, their_alone], strict=True):
            torch.testing.assert_close(one, other, **SAME)


def test_lamb_without_trust_ratios_is_bitwise_fused_adamw() -> None:
    weights = make_weights(torch.float32)
    others = copy.deepcopy(weights)
    groups = [{"params": weights, "trust_ratio": False}]
    take_steps(LAMB(groups, **SETTINGS, weight_decay=0.1), RATES)
    take_steps(torch.optim.AdamW(others, **SETTINGS, weight_decay=0.1, fused=True), RATES)
    assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_foreach_equals_the_update_of_one_tensor_at_a_time(weight_decay: float) -> None:
    results = []
    for foreach in (False, True):
        weights = [*make_weights(torch.float32), nn.Parameter(random(300, ROW // 2, dtype=torch.float32))]
        take_steps(LAMB(weights, **SETTINGS, weight_decay=weight_decay, foreach=foreach), RATES)
        results.append(weights)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("foreach", [None, True])
def test_memory_order_of_weight_gradient_and_state_does_not_matter(foreach: bool | None) -> None:
    plain = nn.Parameter(random(8, 16, 3, 3, dtype=torch.float32))
    permuted = nn.Parameter(plain.detach().to(memory_format=torch.channels_last))
    sliced = nn.Parameter(torch.zeros(8, 32, 3, 3)[:, ::2].copy_(plain.detach()))
    unscaled = nn.Parameter(torch.zeros(8, 32, 3, 3)[:, ::2].copy_(plain.detach()))
    expected = nn.Parameter(plain.detach().clone())
    turned = nn.Parameter(plain.detach().to(memory_format=torch.channels_last))
    for_all, by_adam = [plain, permuted, sliced], [expected, unscaled, turned]
    groups = [{"params": for_all}, {"params": by_adam, "trust_ratio": False}]
    optimizer = LAMB(groups, **SETTINGS, weight_decay=0.1, foreach=foreach)
    for step in range(3):
        set_learning_rate(optimizer, 0.01)
        for weight in (*for_all, *by_adam):
            weight.grad = random(8, 16, 3, 3, dtype=torch.float32, seed=step + 1)
            if step % 2:
                weight.grad = weight.grad.to(memory_format=torch.channels_last)
        optimizer.step()
        for state in optimizer.state.values():  # as from a file, which does not store the memory order
            state.update({key: value.contiguous() for key, value in state.items()})
    for weight, same in ((permuted, plain), (sliced, plain), (unscaled, expected), (turned, expected)):
        torch.testing.assert_close(weight.detach(), same.detach())


@pytest.mark.parametrize("foreach", [None, True])
def test_zero_weights_and_zero_updates_have_a_trust_ratio_of_one(foreach: bool | None) -> None:
    zeros, still = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))
    zeros.grad, still.grad = torch.full((3, 3), 4.0), torch.zeros(3, 3)
    LAMB([zeros, still], lr=0.5, eps=0.0 + 1e-12, foreach=foreach).step()
    torch.testing.assert_close(zeros.detach(), torch.full((3, 3), -0.5))  # Adam's first step is the sign
    assert torch.equal(still.detach(), torch.ones(3, 3))


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [*(weight.detach().clone() for weight in weights)] + [
        value.clone() for weight in weights for value in optimizer.state[weight].values()
    ]


def test_a_skipped_step_of_a_group_of_groups_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    optimizer = LAMB(parameter_groups(model, 0.1), lr=0.1)
    take_steps(optimizer, [0.1])
    before = state_of(optimizer)
    give_gradients(optimizer, 5, scale=float("nan"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(map(torch.equal, before, state_of(optimizer)))
