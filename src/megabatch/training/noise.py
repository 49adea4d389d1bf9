"""Squared norms of gradients on some steps, from which `runs.noise` estimates the gradient noise scale.

A hook of each parameter sees the gradient of one microbatch before it is added to the others, so the run computes the
same bits with and without a measurement.  On an accelerator the host does not wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.optim.optimizers import gradient_norm
from megabatch.planning.batch import StepPlan
from megabatch.precision.loss_scale import LossScale
from megabatch.runs.noise import ONE_MICROBATCH, noise_record
from megabatch.runs.records import NoiseRecord


class NoiseMeter:
    """Measures every `every`-th step; 0 measures none."""

    def __init__(
        self,
        every: int,
        plan: StepPlan,
        parameters: list[torch.nn.Parameter],
        gradients: GradientAllReduce,
        loss_scale: LossScale,
    ) -> None:
        self.every, self.plan, self.parameters = every, plan, parameters
        self.gradients, self.loss_scale = gradients, loss_scale
        self.norms: list[torch.Tensor] = []  # of one tensor's gradient in one microbatch each
        device = gradients.device
        self.sum_of_squares = torch.zeros(1, dtype=torch.float64, device=device)
        self.not_measured = torch.zeros(2, dtype=torch.float64, device=device)

    def is_due(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0

    def is_measured(self, step: int) -> bool:
        return self.is_due(step) and self.plan.global_batch > self.plan.microbatch

    @contextmanager
    def observe(self, step: int) -> Iterator[None]:
        """Measure the gradients of a microbatch's backward pass."""
        if not self.is_measured(step):
            yield
            return
        handles = [parameter.register_hook(self.note) for parameter in self.parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, gradient: torch.Tensor) -> None:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        self.norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=dtype))

    @torch.no_grad()
    def squares(self, step: int, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return the sum of the squared norms of all microbatches' gradients, and the squared norm of their sum.

        All ranks call it when the optimizer has the all-reduced gradients, before they are clipped.
        """
        if not self.is_measured(step):
            return self.not_measured
        norms = torch.stack(self.norms).double()
        if self.loss_scale.is_on:
            norms /= self.loss_scale.on_device
        torch.sum(norms.square(), dim=0, keepdim=True, out=self.sum_of_squares)
        self.norms = []
        self.gradients.sum_noise(self.sum_of_squares)
        return torch.cat([self.sum_of_squares, gradient_norm(optimizer).double().square().reshape(1)])

    def record(self, step: int, squares: tuple[float, float]) -> NoiseRecord | None:
        """Return the estimates of a step from the result of `squares` on the host, or why a short run has none."""
        num_steps = self.plan.num_steps
        if step + 1 == num_steps < self.every:
            return NoiseRecord(reason=f"no step was measured: {num_steps} steps; make train.noise_every smaller")
        if not self.is_due(step):
            return None
        if not self.is_measured(step):
            return NoiseRecord(reason=ONE_MICROBATCH)
        num_microbatches = self.plan.global_batch // self.plan.microbatch
        return noise_record(*squares, num_microbatches, self.plan.microbatch)
