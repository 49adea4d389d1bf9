"""LARS in float64, each variant written from its formula in megabatch/optim/lars.py; nothing is shared with it."""

from collections.abc import Callable

import torch
from torch import Tensor

MU, ETA, EPS = 0.9, 0.01, 1e-6
Step = Callable[[Tensor, Tensor, float, float], Tensor]  # weight, gradient, rate, decay -> the new weight


def tau(w: Tensor, g: Tensor, decay: float) -> float:
    w_norm, g_norm = w.square().sum().sqrt().item(), g.square().sum().sqrt().item()
    return ETA * w_norm / (g_norm + decay * w_norm + EPS) if w_norm > 0 and g_norm > 0 else 1.0


def you2017() -> Step:
    v = torch.zeros((), dtype=torch.float64)

    def step(w: Tensor, g: Tensor, rate: float, decay: float) -> Tensor:
        nonlocal v
        v = MU * v + rate * tau(w, g, decay) * (g + decay * w)
        return w - v

    return step


def outside() -> Step:
    v = torch.zeros((), dtype=torch.float64)

    def step(w: Tensor, g: Tensor, rate: float, decay: float) -> Tensor:
        nonlocal v
        v = MU * v + tau(w, g, decay) * (g + decay * w)
        return w - rate * v

    return step


def nvidia() -> Step:
    """For rates above 0, by which it divides."""
    v, last = torch.zeros((), dtype=torch.float64), 1.0

    def step(w: Tensor, g: Tensor, rate: float, decay: float) -> Tensor:
        nonlocal v, last
        v = MU * rate / last * v + rate * tau(w, g, decay) * (g + decay * w)
        last = rate
        return w - v

    return step


def larc() -> Step:
    v = torch.zeros((), dtype=torch.float64)

    def step(w: Tensor, g: Tensor, rate: float, decay: float) -> Tensor:
        nonlocal v
        is_zero = not (w.any() and g.any())
        clipped = 1.0 if is_zero or rate == 0 else min(tau(w, g, decay) / rate, 1.0)
        v = MU * v + clipped * (g + decay * w)
        return w - rate * v

    return step


REFERENCES = {"you2017": you2017, "outside": outside, "nvidia": nvidia, "larc": larc}
