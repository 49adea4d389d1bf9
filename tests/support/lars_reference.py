"""LARS in float64, composed of independent implementations.  It shares no code with megabatch/optim/lars.py.
MLPerf's two forms are transcribed from their public code into numpy.

u = tau (g + lambda w) is the step of pytorch_optimizer's LARS without momentum; that LARS has no eps.
The momentum is that of torch.optim.SGD, with u or lr u as the gradient.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_optimizer import LARS
from torch import Tensor, nn

MU, ETA = 0.9, 0.01
EXACT = 2.0**60  # a learning rate so large that the weight is rounded away: the difference is exactly u
Step = Callable[[Tensor, Tensor, float, float], Tensor]  # weight, gradient, learning rate, decay -> new weight


def scaled_gradient(w: Tensor, g: Tensor, decay: float) -> Tensor:
    """u = tau (g + lambda w)."""
    weight = nn.Parameter(w.reshape(1, -1).clone())  # pytorch_optimizer gives vectors no trust ratio
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
    """Take the shorter of the steps of SGD and LARS."""
    momentum = Momentum()

    def step(w: Tensor, g: Tensor, lr: float, decay: float) -> Tensor:
        of_sgd, of_lars = lr * (g + decay * w), scaled_gradient(w, g, decay)
        shorter = of_sgd if of_sgd.norm() <= of_lars.norm() else of_lars
        return momentum.step(w, shorter / lr if lr else g + decay * w, lr)

    return step


def decayed() -> Step:
    """The gradient and its decay are one: LARS without decay of their sum."""
    momentum = Momentum()
    return lambda w, g, lr, decay: momentum.step(w, scaled_gradient(w, g + decay * w, 0.0), lr)


REFERENCES = {"you2017": you2017, "outside": outside, "larc": larc, "decayed": decayed}

Array = NDArray[np.float64]
LRS = [3.0 * step / 5 for step in range(1, 6)] + [3.0 * (1 - step / 20) ** 2 + 1e-4 for step in range(1, 20)]


class MlperfReference:
    """mlcommons/training, retired_benchmarks/resnet-tf2/tensorflow2/lars_optimizer.py: `_resource_apply_dense`.

    `is_skipped`: the name is in the skip list (BatchNorm and biases), and the parameter neither decays nor is scaled.
    """

    def __init__(self, momentum: float, weight_decay: float, eeta: float, epsilon: float) -> None:
        self.momentum, self.weight_decay, self.eeta, self.epsilon = momentum, weight_decay, eeta, epsilon
        self.mom: Array | float = 0.0

    def step(self, var: Array, grad: Array, learning_rate: float, is_skipped: bool) -> Array:
        scaled_lr = learning_rate
        if not is_skipped:
            w_norm, g_norm = np.linalg.norm(var.ravel()), np.linalg.norm(grad.ravel())
            trust_ratio: Any = 1.0
            if w_norm > 0 and g_norm > 0:
                trust_ratio = self.eeta * w_norm / (g_norm + self.weight_decay * w_norm + self.epsilon)
            scaled_lr = learning_rate * trust_ratio
            grad = grad + self.weight_decay * var
        self.mom = self.mom * self.momentum - grad * scaled_lr
        return var + self.mom


class NvidiaSubmission(MlperfReference):
    """training_results_v3.0, NVIDIA's mxnet/common/fit.py, SGDwFASTLARS: the momentum is multiplied by lr / last lr."""

    last_lr: float | None = None

    def step(self, var: Array, grad: Array, learning_rate: float, is_skipped: bool) -> Array:
        usual = self.momentum
        self.momentum = usual * learning_rate / (self.last_lr or learning_rate)
        stepped = super().step(var, grad, learning_rate, is_skipped)
        self.momentum, self.last_lr = usual, learning_rate
        return stepped


MLPERF = {"you2017": MlperfReference, "outside": NvidiaSubmission}
