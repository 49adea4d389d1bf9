import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.optim import LARS, parameter_groups
from megabatch.optim.lars import VARIANTS, trust_ratio, trust_ratios
from megabatch.optim.momentum import ROW, norm
from megabatch.optim.optimizers import OPTIMIZERS, OptimSettings, set_learning_rate
from tests.support.lars_reference import ETA, LRS, MLPERF, MU, REFERENCES
from tests.support.optimizers import SAME, SHAPES, give_gradients, make_weights, random, take_steps

DECAY, EPS = 0.02, 1e-6
RATES = [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, 0.0, 1.5, 1.0, 0.4, 0.1, 0.01]  # warm-up from 0, a pause, decay
ABOVE_ZERO = [rate for rate in RATES if rate]


def make_lars(weights: list[nn.Parameter], **settings: Any) -> LARS:
    return LARS(weights, **({"lr": 1.0, "momentum": MU, "weight_decay": DECAY, "trust_coefficient": ETA} | settings))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_its_reference_in_float64(variant: str, foreach: bool | None) -> None:
    weights = make_weights()
    expected, steps = [weight.detach().clone() for weight in weights], [REFERENCES[variant]() for _ in weights]
    optimizer = make_lars(weights, variant=variant, foreach=foreach)
    for step, rate in enumerate(RATES):
        take_steps(optimizer, [rate], first=step)
        for index, weight in enumerate(weights):
            assert weight.grad is not None
            expected[index] = steps[index](expected[index], weight.grad, rate, DECAY)
            torch.testing.assert_close(weight.detach(), expected[index], **SAME)


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("variant", MLPERF)
def test_mlperfs_lars_step_by_step(variant: str, foreach: bool | None) -> None:
    """Through warm-up and decay, on convolution, BatchNorm, linear layer and biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5)).double()
    groups = parameter_groups(model, weight_decay=2e-4)
    optimizer = LARS(groups, lr=1.0, momentum=0.94, eps=1e-3, variant=variant, foreach=foreach)
    expected = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    steppers = {name: MLPERF[variant](0.94, 2e-4, 0.001, 1e-3) for name in expected}
    for step, rate in enumerate(LRS):
        set_learning_rate(optimizer, rate)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.grad = random(*parameter.shape, seed=100 * step + index)
            is_skipped = name.startswith("1.") or name.endswith("bias")
            expected[name] = steppers[name].step(expected[name], parameter.grad.numpy(), rate, is_skipped)
        optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), torch.from_numpy(expected[name]), **SAME)


@pytest.mark.parametrize("scale", [1.0, 1e8])  # at 1e8 the trust ratio is too small for the fused kernel
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_step_of_each_weight_is_correct_up_to_rounding(variant: str, scale: float) -> None:
    weight, gradient = random(3, 50_000, dtype=torch.float32), scale * random(3, 50_000, dtype=torch.float32, seed=1)
    parameter = nn.Parameter(weight.clone())
    optimizer = make_lars([parameter], variant=variant)
    parameter.grad = gradient.clone()
    optimizer.step()
    expected = weight.double() - REFERENCES[variant]()(weight.double(), gradient.double(), 1.0, DECAY)
    buffer = optimizer.state[parameter]["momentum_buffer"].double()
    torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=1e-7 * expected.abs().max().item())


def test_outside_equals_lars_of_pytorch_optimizer() -> None:
    weights = [nn.Parameter(random(4, 7)), nn.Parameter(random(6, 5, seed=1))]
    theirs = copy.deepcopy(weights)
    take_steps(make_lars(weights, variant="outside"), RATES)
    take_steps(pytorch_optimizer.LARS(theirs, lr=1.0, momentum=MU, weight_decay=DECAY, trust_coefficient=ETA), RATES)
    for mine, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(mine, other, **SAME)


@pytest.mark.usefixtures("torchvision")  # which timm imports
@pytest.mark.parametrize("eps", [EPS, 5.0])
@pytest.mark.parametrize("variant", ["outside", "larc"])
def test_outside_and_larc_equal_lars_of_timm_also_with_eps(variant: str, eps: float) -> None:
    import timm.optim as timm

    weights = [nn.Parameter(random(4, 7)), nn.Parameter(random(6, 5, seed=1))]
    theirs = copy.deepcopy(weights)
    rates = ABOVE_ZERO  # timm divides by it
    take_steps(make_lars(weights, variant=variant, eps=eps), rates)
    settings = {"momentum": MU, "weight_decay": DECAY, "trust_coeff": ETA, "eps": eps}
    take_steps(timm.Lars(theirs, lr=1.0, trust_clip=variant == "larc", **settings), rates)
    for mine, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(mine, other, **SAME)


@pytest.mark.parametrize("foreach", [None, True])
def test_eps_is_added_to_the_gradients_norm(foreach: bool | None) -> None:
    """Calculated by hand: with |w| = 5, |g| = 5 and eps = 5 the trust ratio is 0.1 x 5 / (5 + 5) = 0.05."""
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.0, 5.0])
    make_lars([weight], weight_decay=0.0, trust_coefficient=0.1, eps=5.0, foreach=foreach).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 3.75]))


@pytest.mark.parametrize("variant", ["outside", "larc"])
def test_lars_without_trust_ratios_is_bitwise_fused_sgd(variant: str) -> None:
    weights = make_weights(torch.float32)
    others = copy.deepcopy(weights)
    take_steps(make_lars([{"params": weights, "trust_ratio": False}], variant=variant), ABOVE_ZERO)  # type: ignore[list-item]
    take_steps(torch.optim.SGD(others, lr=1.0, momentum=MU, weight_decay=DECAY, fused=True), ABOVE_ZERO)
    assert all(torch.equal(mine, other) for mine, other in zip(weights, others, strict=True))


def test_you2017_without_trust_ratios_is_sgd_at_a_constant_learning_rate() -> None:
    weights = make_weights()
    others = copy.deepcopy(weights)
    take_steps(make_lars([{"params": weights, "trust_ratio": False}]), [0.3] * 5)  # type: ignore[list-item]
    take_steps(torch.optim.SGD(others, lr=1.0, momentum=MU, weight_decay=DECAY), [0.3] * 5)
    for mine, other in zip(weights, others, strict=True):
        torch.testing.assert_close(mine, other, **SAME)


@pytest.mark.parametrize("foreach", [None, True])
def test_scale_of_the_gradient_does_not_matter_without_weight_decay(foreach: bool | None) -> None:
    """This holds only if the trust ratio also applies without weight decay."""
    results = []
    for scale in (1.0, 2.0**-30, 2.0**40):
        weights = make_weights(torch.float32)
        take_steps(make_lars(weights, weight_decay=0.0, foreach=foreach), RATES, scale=scale)
        results.append(weights)
    for scaled in results[1:]:
        for one, other in zip(results[0], scaled, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_trust_ratio_is_one_if_a_norm_is_zero() -> None:
    settings = {"trust_coefficient": 0.5, "weight_decay": 0.0}
    for clip_at in (None, 0.0, 10.0):
        for norms in ((0.0, 2.0), (2.0, 0.0), (0.0, 0.0)):
            assert trust_ratio(*norms, clip_at=clip_at, **settings) == 1
    assert trust_ratio(2.0, 4.0, **settings) == 0.25
    assert [trust_ratio(2.0, 4.0, clip_at=rate, **settings) for rate in (0.5, 0.1, 0.0)] == [0.5, 1, 1]


@pytest.mark.parametrize("clip_at", [None, 0.0, 0.01, 10.0])
@pytest.mark.parametrize(("weight_decay", "eps"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.2)])
def test_trust_ratios_of_many_tensors_equal_those_of_each(
    weight_decay: float, eps: float, clip_at: float | None
) -> None:
    norms = torch.tensor([0.0, 1e-12, 0.3, 2.0, 1e6], dtype=torch.float64)
    weights, gradients = norms.repeat_interleave(5), norms.repeat(5)
    settings: dict[str, Any] = {"trust_coefficient": 0.02, "weight_decay": weight_decay, "eps": eps, "clip_at": clip_at}
    pairs = zip(weights.tolist(), gradients.tolist(), strict=True)
    assert trust_ratios(weights, gradients, **settings).tolist() == [trust_ratio(*pair, **settings) for pair in pairs]


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("variant", ["you2017", "outside", "larc"])
def test_zero_weights_and_zero_gradients_move_as_with_sgd(variant: str, foreach: bool | None) -> None:
    for weight, gradient, expected in ((0.0, 1.0, -0.5), (1.0, 0.0, 1 - 0.5 * DECAY)):
        parameter = nn.Parameter(torch.full((3, 3), weight))
        parameter.grad = torch.full((3, 3), gradient)
        make_lars([parameter], lr=0.5, variant=variant, foreach=foreach).step()
        torch.testing.assert_close(parameter.detach(), torch.full((3, 3), expected))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("momentum", [MU, 0.0])
def test_memory_order_of_weight_gradient_and_buffer_does_not_matter(momentum: float, foreach: bool | None) -> None:
    shape = (64, 64, 3, 3)  # whole rows of `norm`, and more than one
    plain = nn.Parameter(random(*shape, dtype=torch.float32))
    permuted = nn.Parameter(plain.detach().to(memory_format=torch.channels_last))
    sliced = nn.Parameter(torch.zeros(64, 128, 3, 3)[:, ::2].copy_(plain.detach()))
    for_all = [plain, permuted, sliced]
    optimizer = make_lars(for_all, momentum=momentum, foreach=foreach)
    for step in range(4):
        for weight in for_all:
            weight.grad = random(*shape, dtype=torch.float32, seed=step + 1)
            if step % 2:
                weight.grad = weight.grad.to(memory_format=torch.channels_last)
        optimizer.step()
    for weight in (permuted, sliced):
        torch.testing.assert_close(weight.detach(), plain.detach())
    if momentum:
        assert optimizer.state[permuted]["momentum_buffer"].stride() == permuted.stride()


@pytest.mark.parametrize("variant", VARIANTS)
def test_foreach_equals_the_update_of_one_tensor_at_a_time(variant: str) -> None:
    results = []
    for foreach in (False, True):
        weights = make_weights(torch.float32)
        take_steps(make_lars(weights, variant=variant, foreach=foreach), RATES)
        results.append(weights)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_norm_before_a_step_changes_nothing(variant: str, foreach: bool) -> None:
    """The norm is taken in every other step; the steps in between must use the new gradients."""
    results = []
    for asks in (False, True):
        weights = make_weights(torch.float32)
        groups = [{"params": weights[:2]}, {"params": weights[2:], "trust_ratio": False}]
        optimizer = make_lars(groups, variant=variant, foreach=foreach)  # type: ignore[arg-type]
        for step, rate in enumerate(RATES):
            if asks and step % 2:
                give_gradients(optimizer, step)
                gradients = torch.cat([weight.grad.flatten() for weight in weights])  # type: ignore[union-attr]
                torch.testing.assert_close(optimizer.gradient_norm(), gradients.double().norm(), rtol=1e-6, atol=0.0)
            take_steps(optimizer, [rate], first=step)
        results.append([*weights, *(state["momentum_buffer"] for state in optimizer.state.values())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_norm_of_a_gradient_with_inf_or_nan_is_not_finite(foreach: bool, value: float) -> None:
    for index in range(len(SHAPES)):
        weights = make_weights(torch.float32)
        groups = [{"params": weights[:2]}, {"params": weights[2:], "trust_ratio": False}]
        optimizer = make_lars(groups, foreach=foreach)  # type: ignore[arg-type]
        give_gradients(optimizer, 0)
        weights[index].grad.view(-1)[-1] = value  # type: ignore[union-attr]
        assert not optimizer.gradient_norm().isfinite()


@pytest.mark.parametrize("foreach", [False, True])
def test_step_changes_nothing_if_gradients_overflowed(foreach: bool) -> None:
    weights = make_weights(torch.float32)
    groups: list[Any] = [{"params": weights[:2]}, {"params": weights[2:], "trust_ratio": False}]
    optimizer = make_lars(groups, foreach=foreach)
    take_steps(optimizer, RATES)
    before = copy.deepcopy((weights, optimizer.state_dict()["state"]))
    for weight in weights:
        weight.grad = torch.full_like(weight, torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for weight, kept in zip(weights, before[0], strict=True):
        assert torch.equal(weight, kept)
    for place, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], before[1][place]["momentum_buffer"])
    optimizer.found_inf = torch.zeros(())
    take_steps(optimizer, RATES)
    assert not any(torch.equal(weight, kept) for weight, kept in zip(weights, before[0], strict=True))


@pytest.fixture
def fused_sgd_off_the_cpu() -> Iterator[None]:
    """Provide a fused SGD for the meta device, which has none."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_fused_sgd_", lambda *args, **settings: None)
    yield
    library._destroy()


@pytest.mark.usefixtures("fused_sgd_off_the_cpu")
@pytest.mark.parametrize("variant", VARIANTS)
def test_off_the_cpu_no_step_waits_for_a_value(variant: str) -> None:
    """Tensors of the meta device have no values, so reading one fails."""
    weights = [nn.Parameter(weight.detach().to("meta")) for weight in make_weights(torch.float32)]
    groups: list[Any] = [{"params": weights[:2]}, {"params": weights[2:], "trust_ratio": False}]
    optimizer = make_lars(groups, variant=variant)
    for rate in RATES:
        set_learning_rate(optimizer, rate)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer.step()
    optimizer.param_groups[0]["foreach"] = False
    set_learning_rate(optimizer, 1.0)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        optimizer.step()


def test_norm_is_correct_for_any_size_and_number_of_threads() -> None:
    threads = torch.get_num_threads()
    for size in (0, 1, ROW - 1, ROW, ROW + 1, 100 * ROW + 5):
        tensor = random(size, dtype=torch.float32)
        assert norm(tensor) == pytest.approx(tensor.double().norm().item(), rel=2e-7)
    tensor = random(1 << 20, dtype=torch.float32) + 1
    torch.set_num_threads(1)
    alone = norm(tensor)
    torch.set_num_threads(threads)
    assert alone == norm(tensor)
    assert alone == pytest.approx(tensor.double().norm().item(), rel=2e-7)


@pytest.mark.parametrize("variant", VARIANTS)
def test_restored_state_resumes_bitwise(variant: str) -> None:
    weights = make_weights(torch.float32)
    weights[0] = nn.Parameter(weights[0].detach().to(memory_format=torch.channels_last))
    optimizer = make_lars(weights, variant=variant)
    take_steps(optimizer, RATES[:5])
    again = copy.deepcopy(weights)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    for state in saved["state"].values():  # as loaded from a file, which has no memory order
        state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    restored = make_lars(again, lr=7.0, variant="you2017", weight_decay=0.5)
    restored.load_state_dict(saved)
    assert restored.state[again[0]]["momentum_buffer"].stride() == again[0].stride()
    duplicate = copy.deepcopy(optimizer)
    for each in (optimizer, restored, duplicate):
        take_steps(each, RATES[5:], first=5)
    for index, weight in enumerate(weights):
        assert torch.equal(weight, again[index])
        assert torch.equal(weight, duplicate.param_groups[0]["params"][index])


def test_groups_can_be_added_later_and_parameters_can_lack_a_gradient() -> None:
    first, late, unused = (nn.Parameter(random(3, 3, seed=seed)) for seed in range(3))
    optimizer = make_lars([first, unused])
    first.grad = random(3, 3)
    optimizer.step()
    optimizer.add_param_group({"params": [late], "weight_decay": 0.0, "trust_ratio": False, "variant": "outside"})
    before = late.detach().clone()
    late.grad = random(3, 3, seed=9)
    optimizer.step()
    torch.testing.assert_close(late.detach(), before - late.grad)
    assert torch.equal(unused, random(3, 3, seed=2)) and not optimizer.state[unused]


def test_schedulers_and_closures_work_as_with_torch_optimizers() -> None:
    weight = nn.Parameter(random(3, 3))
    expected, step = weight.detach().clone(), REFERENCES["you2017"]()
    optimizer = make_lars([weight])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**3).sum()
        loss.backward()
        return loss.item()

    for epoch in range(6):
        assert optimizer.step(closure) == pytest.approx((expected**3).sum().item())
        expected = step(expected, 3 * expected**2, epoch / 4, DECAY)
        scheduler.step()
        torch.testing.assert_close(weight.detach(), expected, **SAME)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr=-1 is not allowed: expected lr >= 0; for example"),
        ({"lr": float("nan")}, r"lr=nan"),
        ({"momentum": 1.0}, r"momentum=1 .*0 <= momentum < 1; for example momentum=0.9"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1 .*nearest: weight_decay=0"),
        (
            {"trust_coefficient": 0.0},
            r"trust_coefficient=0 .*trust_coefficient > 0; for example trust_coefficient=0.001",
        ),
        ({"eps": -1e-9}, r"eps=-1e-09 .*nearest: eps=0"),
        ({"variant": "lark"}, r"variant='lark' is not one of you2017, .*nearest: variant=larc"),
    ],
)
def test_invalid_value_is_rejected_also_in_a_later_group(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_lars(make_weights(), **settings)
    optimizer = make_lars(make_weights())
    with pytest.raises(UserError, match=message):
        optimizer.add_param_group({"params": make_weights(), **settings})
    assert len(optimizer.param_groups) == 1


def test_half_precision_is_rejected() -> None:
    with pytest.raises(UserError, match=r"torch.float16, .*too small for LARS; .*float32"):
        make_lars([nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))])
    optimizer = make_lars(make_weights())
    with pytest.raises(UserError, match="float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))]})
    assert len(optimizer.param_groups) == 1


def test_lars_of_a_recipe_has_trust_ratios_only_for_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    settings = OptimSettings(
        name="lars", learning_rate=2.0, variant="larc", trust_coefficient=0.01, eps=1e-8, weight_decay=0.1
    )
    optimizer = OPTIMIZERS["lars"](parameter_groups(model, settings.weight_decay), settings)
    seen = {group["name"]: (group["trust_ratio"], group["weight_decay"]) for group in optimizer.param_groups}
    assert seen == {"weights": (True, 0.1), "biases": (False, 0.0), "normalisation": (False, 0.0)}
    group = optimizer.param_groups[0]
    assert (group["variant"], group["trust_coefficient"], group["eps"], group["lr"]) == ("larc", 0.01, 1e-8, 2.0)
