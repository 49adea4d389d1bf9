import pytest
import torch
from megabatch_lab.studies.lars_in_fp16 import LarsInFp16

from megabatch.errors import UserError
from megabatch.optim.optimizers import OPTIMIZERS, OptimSettings, clip_gradients, make_optimizer, set_learning_rate


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs_plain_one(nesterov: bool) -> None:
    """Ours is fused: another kernel than that of the reference, which goes tensor by tensor."""
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


def test_clipping_shortens_the_whole_gradient_and_only_a_long_one() -> None:
    parts = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD([{"params": [part]} for part in parts], lr=1.0)
    for limit, expected in ((0.0, 13.0), (20.0, 13.0), (6.5, 6.5)):
        parts[0].grad, parts[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        clip_gradients(optimizer, limit)
        length = torch.cat([part.grad for part in parts if part.grad is not None]).norm().item()
        assert length == pytest.approx(expected, rel=1e-4)


def test_sgd_has_nesterov_by_default_where_there_is_momentum_and_lars_refuses_it() -> None:
    for momentum, expected in ((0.9, True), (0.0, False)):
        settings = OptimSettings(learning_rate=0.1, momentum=momentum)
        assert OPTIMIZERS["sgd"]([{"params": [torch.zeros(1)]}], settings).defaults["nesterov"] is expected
    with pytest.raises(UserError, match=r"optim.nesterov=true with optim.name=lars: .*leave nesterov out"):
        OptimSettings(name="lars", learning_rate=0.1, nesterov=True)


def forgetful(groups: object, settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(1)], lr=settings.learning_rate)


def test_an_optimizer_of_ones_own_is_named_by_its_module() -> None:
    groups = [{"params": [torch.zeros(3, requires_grad=True)], "weight_decay": 0.1, "param_names": ["w"]}]
    settings = OptimSettings(name="megabatch_lab.studies.lars_in_fp16:lars_in_fp16", learning_rate=0.1, momentum=0.8)
    optimizer = make_optimizer(groups, settings)
    assert isinstance(optimizer, LarsInFp16) and optimizer.param_groups[0]["momentum"] == 0.8
    for name, reason in (
        ("no.such:thing", r"optim.name='no.such:thing' cannot be imported"),
        (f"{__name__}:pytest", "is a module; it must be a function or a class"),
        (f"{__name__}:forgetful", "of other parameter groups than it was given"),
    ):
        with pytest.raises(UserError, match=reason):
            make_optimizer(groups, OptimSettings(name=name, learning_rate=0.1))


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim.nesterov=false"):
        OptimSettings(learning_rate=0.1, momentum=0.0, nesterov=True)
