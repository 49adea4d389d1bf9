import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch.config.loading import load_config
from megabatch.config.resolve import plan_groups
from megabatch.errors import UserError
from megabatch.models.small import small_resnet
from megabatch.optim import Muon
from megabatch.optim.muon import COEFFICIENTS, ROUNDS, orthogonalise
from megabatch.optim.optimizers import Several, follow_schedule, make_optimizer, parts_of, set_learning_rate
from tests.support.optimizers import SAME, give_gradients, random, take_steps

MATRICES = [(8, 20), (20, 8), (5, 5), (8, 20)]
RATES = [0.02, 0.05, 0.0, 0.01]


def matrices(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, seed=seed)) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("shape", [(6, 6), (4, 30), (30, 4)])
def test_the_iteration_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    both = torch.stack([random(*shape), random(*shape, seed=1)])
    a, b, c = COEFFICIENTS
    for matrix, found in zip(both, orthogonalise(both), strict=True):
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.norm()
        for _ in range(ROUNDS):
            s = a * s + b * s**3 + c * s**5
        torch.testing.assert_close(found, u @ torch.diag(s) @ v, rtol=1e-9, atol=1e-12)
        assert s.min() > 0.3 and s.max() < 1.3


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("nesterov", "momentum"), [(True, 0.9), (False, 0.9), (False, 0.0)])
def test_muon_equals_torchs_step_by_step_in_float64(
    nesterov: bool, momentum: float, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's iteration would be in 16 bits; torch 2.15 calls `to`.
    convert = Tensor.to

    def keep(self: Tensor, *to: Any, **by: Any) -> Tensor:
        return self.clone() if by.get("dtype") is torch.bfloat16 else convert(self, *to, **by)

    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    monkeypatch.setattr(Tensor, "to", keep)
    weights = matrices(*MATRICES)
    theirs = copy.deepcopy(weights)
    settings: dict[str, Any] = {"lr": 1.0, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.1}
    mine, others = Muon(weights, scale=scale, **settings), torch.optim.Muon(theirs, adjust_lr_fn=scale, **settings)
    for step, rate in enumerate(RATES):
        take_steps(mine, [rate], first=step)
        take_steps(others, [rate], first=step)
        for one, other in zip(weights, theirs, strict=True):
            torch.testing.assert_close(one, other, **SAME)


@pytest.mark.usefixtures("torchvision")  # which timm imports
def test_filters_are_flattened_as_in_timm_in_any_memory_order(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm.optim.muon as timm

    monkeypatch.setattr(timm.zeropower_via_newtonschulz, "__defaults__", (1e-7, 1.0, torch.float64, False))
    weights = matrices((8, 4, 3, 3), (8, 4, 3, 3), (8, 36))
    theirs = copy.deepcopy(weights)
    weights[1] = nn.Parameter(weights[1].detach().to(memory_format=torch.channels_last))
    settings: dict[str, Any] = {"lr": 1.0, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    mine = Muon(weights, scale="match_rms_adamw", **settings)
    others = timm.Muon(theirs, ns_coefficients="original", adjust_lr_fn="match_rms_adamw", **settings)
    for step, rate in enumerate(RATES):
        for optimizer in (mine, others):
            set_learning_rate(optimizer, rate)
            give_gradients(optimizer, step)
        if step % 2:
            for weight in weights[:2]:
                assert weight.grad is not None
                weight.grad = weight.grad.to(memory_format=torch.channels_last)
        mine.step()
        others.step()
    for one, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-9, atol=1e-11)


def test_a_fixed_norm_replaces_that_of_the_weight_before_each_update() -> None:
    (weight,) = matrices((4, 9))
    optimizer = Muon([weight], lr=1.0, momentum=0.6, scale="none", fixed_norm=True)
    buffer, expected = torch.zeros(4, 9, dtype=torch.float64), weight.detach().clone()
    for step, rate in enumerate(RATES):
        take_steps(optimizer, [rate], first=step)
        assert weight.grad is not None
        buffer = 0.6 * buffer + weight.grad
        update = orthogonalise((weight.grad + 0.6 * buffer).unsqueeze(0))[0]
        expected = expected * (4**0.5 / expected.norm()) - rate * update
        torch.testing.assert_close(weight.detach(), expected, **SAME)


def test_weights_in_fp32_move_as_those_in_fp64_up_to_the_rounding_of_16_bits() -> None:
    weights = matrices((16, 40))
    rounded = [nn.Parameter(weight.detach().float()) for weight in weights]
    for each in (weights, rounded):
        optimizer = Muon(each, lr=0.1, momentum=0.9)
        each[0].grad = random(16, 40, seed=3).to(each[0].dtype)
        optimizer.step()
    moved, expected = (each[0].detach().double() - random(16, 40) for each in (rounded, weights))
    assert (moved - expected).norm() < 0.03 * expected.norm()


def test_muon_refuses_what_is_not_a_matrix() -> None:
    for shape in ((4,), (1, 5, 5), (8, 1, 3, 3)):
        with pytest.raises(UserError, match=r"Muon is for matrices, not for \[.*another optimizer"):
            Muon([nn.Parameter(torch.zeros(shape))], lr=0.1)


def groups_of_resnet(*overrides: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    config = load_config("smoke", ["optim.name=muon", *overrides])
    model = small_resnet(10, 3).double()
    return dict(model.named_parameters()), make_optimizer(plan_groups(config, model), config.optim)


def test_a_recipes_muon_leaves_the_head_and_vectors_to_another_optimizer() -> None:
    named, optimizer = groups_of_resnet("optim.learning_rate=0.02", "optim.muon.others_learning_rate=0.004")
    assert isinstance(optimizer, Several)
    of_muon, others = parts_of(optimizer)
    assert isinstance(of_muon, Muon) and type(others) is torch.optim.AdamW
    names = {name for group in of_muon.param_groups for name in group["param_names"]}
    assert names == {name for name, parameter in named.items() if parameter.dim() == 4}
    set_learning_rate(optimizer, 0.01)
    assert {group["lr"] for group in of_muon.param_groups} == {0.01}
    assert [group["lr"] for group in others.param_groups] == pytest.approx([0.002] * 3)
    take_steps(optimizer, [0.01])
    assert optimizer.state.keys() == set(named.values())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    give_gradients(optimizer, 1, scale=float("inf"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(before[name], parameter) for name, parameter in named.items())


def test_layer_decay_also_multiplies_the_learning_rate_of_the_other_parameters() -> None:
    def rates(*overrides: str) -> list[dict[str, float]]:
        _, optimizer = groups_of_resnet("optim.layer_decay=0.5", "optim.learning_rate=0.02", *overrides)
        groups = [part.param_groups for part in parts_of(optimizer)]
        return [
            {name: group.get("lr_factor", 1.0) for group in part for name in group["param_names"]} for part in groups
        ]

    (others, of_muon), lower = rates(), rates("optim.muon.others_learning_rate=0.004")
    assert len({*others.values()}) > 5
    assert lower == [pytest.approx({name: factor / 5 for name, factor in others.items()}), of_muon]


def test_groups_can_express_the_recipe_of_airbench() -> None:
    """Muon on filters; Nesterov SGD with other rates, momentum and decay on biases and head, and one bias for 3/8."""
    biases = '{parameters=["*.bias"], learning_rate=106, momentum=0.85, weight_decay=3.77e-5}'
    head = '{parameters=["*fc.weight"], optimizer="sgd", learning_rate=1340, momentum=0.85, weight_decay=2.99e-6}'
    first = '{parameters=["stem.1.bias"], learning_rate=50, until=0.375}'
    settings = ["optim.learning_rate=0.24", "optim.momentum=0.6", "optim.muon.others=sgd"]
    settings += ["optim.muon.rounds=3", "optim.muon.fixed_norm=true", "optim.muon.scale=none"]
    names = list(dict(small_resnet(10, 3).named_parameters()))
    bias = next(name for name in names if name.endswith(".bias"))
    first, head = first.replace("stem.1.bias", bias), head.replace("*fc.weight", names[-2])
    _, optimizer = groups_of_resnet(*settings, f"optim.groups=[{biases}, {head}, {first}]")
    group_of = {name: group for group in optimizer.param_groups for name in group["param_names"]}

    def schedule(step: float) -> float:
        return 0.24 * (1 - step / 200)

    for step, rate, early in ((0, 1.0, 1.0), (30, 0.85, 0.6), (100, 0.5, 0.0)):
        follow_schedule(optimizer, schedule, step, 200)
        assert group_of[names[-2]]["lr"] == pytest.approx(1340 * rate)
        assert group_of[bias]["lr"] == pytest.approx(50 * early)
        assert group_of[names[0]]["lr"] == pytest.approx(0.24 * rate)
    of_head, of_filter = group_of[names[-2]], group_of[names[0]]
    assert (of_head["momentum"], of_head["weight_decay"], of_head["nesterov"]) == (0.85, 2.99e-6, True)
    assert (of_filter["momentum"], of_filter["rounds"], of_filter["fixed_norm"]) == (0.6, 3, True)
    with pytest.raises(UserError, match=r"optim.groups: no parameter matches 'no\.\*'; nearest:"):
        groups_of_resnet('optim.groups=[{parameters=["no.*"]}]')
