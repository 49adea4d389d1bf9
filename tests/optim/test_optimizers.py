import math

import pytest
import torch
from megabatch_lab.studies.lars_in_fp16 import LarsInFp16

from megabatch.errors import UserError
from megabatch.optim.optimizers import (
    OPTIMIZERS,
    OptimSettings,
    clip_gradients,
    make_optimizer,
    set_learning_rate,
    step_unless,
)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_unfused_sgd_of_torch(nesterov: bool) -> None:
    """The product uses the fused kernel; the reference processes one tensor at a time."""
    settings = OptimSettings(learning_rate=1.0, momentum=0.9, nesterov=nesterov)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True)
    expected = weight.detach().clone().requires_grad_()
    reference = torch.optim.SGD(
        [expected], lr=1.0, momentum=0.9, nesterov=nesterov, weight_decay=0.01, foreach=False, fused=False
    )
    optimizer = OPTIMIZERS["sgd"]([{"params": [weight], "weight_decay": 0.01}], settings)
    for step in range(5):
        weight.grad = torch.randn(7, dtype=torch.float64, generator=generator)
        expected.grad = weight.grad.clone()
        for each in (optimizer, reference):
            set_learning_rate(each, 0.1 * (step + 1))
            each.step()
        torch.testing.assert_close(weight, expected, rtol=1e-13, atol=1e-13)


def test_clipping_scales_the_whole_gradient_only_above_the_limit() -> None:
    parts = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD([{"params": [part]} for part in parts], lr=1.0)
    for limit, expected in ((0.0, 13.0), (20.0, 13.0), (6.5, 6.5)):
        parts[0].grad, parts[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        clip_gradients(optimizer, limit)
        length = torch.cat([part.grad for part in parts if part.grad is not None]).norm().item()
        assert length == pytest.approx(expected, rel=1e-4)


def test_sgd_with_momentum_uses_nesterov_by_default_and_lars_rejects_it() -> None:
    for momentum, expected in ((0.9, True), (0.0, False)):
        settings = OptimSettings(learning_rate=0.1, momentum=momentum)
        assert OPTIMIZERS["sgd"]([{"params": [torch.zeros(1)]}], settings).defaults["nesterov"] is expected
    with pytest.raises(UserError, match=r"optim.nesterov=true with optim.name=lars: .*leave nesterov out"):
        OptimSettings(name="lars", learning_rate=0.1, nesterov=True)


def test_decoupled_decay_shrinks_weights_with_the_shape_of_the_schedule_beside_sgds_step() -> None:
    """Against the formula on plain SGD without decay; and nothing changes where `found_inf` is 1."""
    peak, decay = 2.0, 0.01
    settings = OptimSettings(learning_rate=peak, momentum=0.9, nesterov=False, decoupled_decay=True)
    weight, head = (torch.randn(7, dtype=torch.float64).requires_grad_() for _ in range(2))
    groups = [{"params": [weight], "weight_decay": decay}, {"params": [head], "weight_decay": decay, "lr_factor": 3.0}]
    optimizer = OPTIMIZERS["sgd"](groups, settings)
    expected = [each.detach().clone() for each in (weight, head)]
    momenta = [torch.zeros(7, dtype=torch.float64) for _ in range(2)]
    for rate, skipped in ((0.5, None), (1.0, 0.0), (2.0, 1.0), (0.7, 0.0), (0.0, None)):
        optimizer.found_inf = None if skipped is None else torch.tensor(skipped)  # type: ignore[attr-defined]
        set_learning_rate(optimizer, rate)
        for index, each in enumerate((weight, head)):
            each.grad = torch.randn(7, dtype=torch.float64)
            if not skipped:
                momenta[index] = 0.9 * momenta[index] + each.grad
                lr = rate * (1.0, 3.0)[index]
                expected[index] = (1 - decay * rate / peak) * expected[index] - lr * momenta[index]
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(head.detach(), expected[1], rtol=1e-12, atol=1e-12)
    with pytest.raises(UserError, match=r"optim.decoupled_decay=true with optim.name=lars: .* leave"):
        OptimSettings(name="lars", learning_rate=0.1, decoupled_decay=True)
    with pytest.raises(UserError, match=r"optim.weight_decay=1 with optim.decoupled_decay=true: .*less than 1"):
        OptimSettings(learning_rate=0.1, weight_decay=1, decoupled_decay=True)


def forgetful(groups: object, settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(1)], lr=settings.learning_rate)


def test_custom_optimizer_is_imported_by_name() -> None:
    groups = [{"params": [torch.zeros(3, requires_grad=True)], "weight_decay": 0.1, "param_names": ["w"]}]
    settings = OptimSettings(name="megabatch_lab.studies.lars_in_fp16:lars_in_fp16", learning_rate=0.1, momentum=0.8)
    optimizer = make_optimizer(groups, settings)
    assert isinstance(optimizer, LarsInFp16) and optimizer.param_groups[0]["momentum"] == 0.8
    for name, reason in (
        ("no.such:thing", r"optim.name='no.such:thing' cannot be imported"),
        (f"{__name__}:pytest", "is a module; it must be a function or a class"),
        (f"{__name__}:forgetful", "other parameter groups"),
    ):
        with pytest.raises(UserError, match=reason):
            make_optimizer(groups, OptimSettings(name=name, learning_rate=0.1))


def test_a_class_of_torch_gets_the_groups_the_learning_rate_and_its_options() -> None:
    weight = torch.zeros(3, requires_grad=True)
    groups = [{"params": [weight], "weight_decay": 0.3, "param_names": ["w"]}]
    settings = OptimSettings(name="torch.optim:AdamW", learning_rate=0.1, options={"betas": [0.5, 0.6], "fused": True})
    optimizer = make_optimizer(groups, settings)
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.AdamW and (group["lr"], group["weight_decay"]) == (0.1, 0.3)
    assert (group["betas"], group["fused"], group["params"]) == ((0.5, 0.6), True, [weight])
    for name, reason in (
        ("torch.optim:Muon", r"optimizer Muon\(groups, lr=0.1, .* fails: .*; change optim.options or the optimizer"),
        ("torch.nn:Linear", r"optimizer Linear is a class; expected a subclass of torch.optim.Optimizer, or a funct"),
        ("math:sqrt", r"optimizer sqrt cannot be called with \(groups, settings\): .*; expected a subclass of"),
    ):
        with pytest.raises(UserError, match=reason):
            make_optimizer(groups, OptimSettings(name=name, learning_rate=0.1))
    with pytest.raises(UserError, match=r"optim.options is for .*; leave optim.options out"):
        OptimSettings(name="adamw", learning_rate=0.1, options={"fused": True})


@pytest.mark.parametrize("name", ["sgd", "torch.optim:SGD"])
def test_momentum_starts_at_0_if_the_first_step_of_a_fused_sgd_is_skipped(name: str) -> None:
    weight = torch.zeros(3, requires_grad=True)
    groups = [{"params": [weight], "weight_decay": 0.0, "param_names": ["w"]}]
    options = {} if name == "sgd" else {"momentum": 0.9, "fused": True}
    with pytest.MonkeyPatch.context() as patch:  # uninitialized memory is not always different from 0
        patch.setattr(torch, "empty_like", lambda tensor, **how: torch.full_like(tensor, math.nan))
        optimizer = make_optimizer(groups, OptimSettings(name=name, learning_rate=0.1, options=options))
        for found_inf, expected in ((1.0, 0.0), (0.0, -0.19 if name == "sgd" else -0.1)):  # `sgd` has Nesterov's form
            weight.grad = torch.full((3,), math.inf if found_inf else 1.0)
            step_unless(optimizer, torch.tensor(found_inf))
            assert weight.tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize(("name", "eps"), [("adamw", 1e-8), ("lamb", 1e-6), ("lars", 0.0)])
def test_betas_and_eps_are_those_of_the_recipe_or_of_the_optimizer(name: str, eps: float) -> None:
    for given, expected in ((None, eps), (0.0, 0.0), (0.5, 0.5)):
        settings = OptimSettings(name=name, learning_rate=0.1, betas=(0.5, 0.6), eps=given)
        groups = [{"params": [torch.zeros(3, requires_grad=True)], "weight_decay": 0.1}]
        made = make_optimizer(groups, settings).param_groups[0]
        assert made["eps"] == expected and made.get("betas", (0.5, 0.6)) == (0.5, 0.6)


def test_nesterov_without_momentum_is_rejected() -> None:
    with pytest.raises(UserError, match=r"optim.nesterov=false"):
        OptimSettings(learning_rate=0.1, momentum=0.0, nesterov=True)
