"""LARS in float64, put together from what others have written; nothing is shared with megabatch/optim/lars.py.

u = tau (g + lambda w) is the step of pytorch_optimizer's LARS without momentum (and so without eps, which it lacks).
The momentum is that of torch.optim.SGD, which is given u, or lr u, as a gradient.
"""

from collections.abc import Callable

import torch
from pytorch_optimizer import LARS
from torch import Tensor, nn

MU, ETA = 0.9, 0.01
EXACT = 2.0**60  # a learning rate beside which the weight vanishes, so that the difference is u to the last bit
Step = Callable[[Tensor, Tensor, float, float], Tensor]  # weight, gradient, learning rate, decay -> the new weight


def scaled_gradient(w: Tensor, g: Tensor, decay: float) -> Tensor:
    """u = tau (g + lambda w)."""
    weight = nn.Parameter(w.reshape(1, -1).clone())  # a vector would have no trust ratio there
    weight.grad = g.reshape(1, -1).clone()
    LARS([weight], lr=EXACT, momentum=0.0, weight_decay=decay, trust_coefficient=ETA).step()
    return (w - weight.detach().reshape(w.shape)) / EXACT


class Momentum:
    """v = mu v + g, w -= lr v."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.sgd = torch.optim.SGD([self.weight], lr=1.0, momentum=MU, foreach=False)

    def step(self, w: Tensor, gradient: Tensor, lr: float) -> Tensor:
        self.weight.data, self.weight.grad = w.clone(), gradient.clone()
        self.sgd.param_groups[0]["lr"] = lr
        self.sgd.step()
        return self.weight.detach().clone()


def you2017() -> Step:
    momentum = Momentum()
    return lambda w, g, lr, decay: momentum.step(w, lr * scaled_gradient(w, g, decay), lr=1.0)


def outside() -> Step:
    momentum = Momentum()
    return lambda w, g, lr, decay: momentum.step(w, scaled_gradient(w, g, decay), lr)


def larc() -> Step:
    """Of SGD's step and that of LARS, whichever is shorter."""
    momentum = Momentum()

    def step(w: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        of_sgd, of_lars = lr * (g + decay * w), scaled_gradient(w, g, decay)
        shorter = of_sgd if of_sgd.norm() <= of_lars.norm() else of_lars
        return momentum.step(w, shorter / lr if lr else g + decay * w, lr)

    return step


REFERENCES = {"you2017": you2017, "outside": outside, "larc": larc}
