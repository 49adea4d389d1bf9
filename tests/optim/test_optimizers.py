import pytest
import torch

from megabatch.errors import UserError
from megabatch.optim.optimizers import OPTIMIZERS, OptimSettings, clip_gradients, set_learning_rate


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_the_formula(nesterov: bool) -> None:
    """v = mu v + (g + lambda w);  w -= lr (g + lambda w + mu v)  with Nesterov, lr v without."""
    settings = OptimSettings(learning_rate=1.0, momentum=0.9, nesterov=nesterov)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True)
    expected, velocity = weight.detach().clone(), torch.zeros(7, dtype=torch.float64)
    optimizer = OPTIMIZERS["sgd"]([{"params": [weight], "weight_decay": 0.01}], settings)
    for step in range(5):
        rate = 0.1 * (step + 1)
        weight.grad = torch.randn(7, dtype=torch.float64, generator=generator)
        gradient = weight.grad + 0.01 * expected
        velocity = 0.9 * velocity + gradient
        expected = expected - rate * (gradient + 0.9 * velocity if nesterov else velocity)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-13, atol=1e-13)


def test_clipping_shortens_the_whole_gradient_and_only_a_long_one() -> None:
    parts = [torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD([{"params": [part]} for part in parts], lr=1.0)
    for limit, expected in ((0.0, 13.0), (20.0, 13.0), (6.5, 6.5)):
        parts[0].grad, parts[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        clip_gradients(optimizer, limit)
        length = torch.cat([part.grad for part in parts if part.grad is not None]).norm().item()
        assert length == pytest.approx(expected, rel=1e-4)


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim.nesterov=false"):
        OptimSettings(learning_rate=0.1, momentum=0.0, nesterov=True)
