"""The first passes of a run, on real images, whose results are discarded.

They find what is wrong with a model before anything is written, and record when gradients appear, which decides how
these are fused and summed.  The last one lets DDP settle its buckets: it sorts them anew after its first backward, and
where a gradient lies in its bucket can decide how its sum is rounded.  So fresh and resumed runs alike take their first
step on the final buckets.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megabatch.comm.hook import gradient_of
from megabatch.comm.tune import Backward
from megabatch.data.batches import Normalise
from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings, check_logits, model_errors
from megabatch.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class Trial:
    settings: ModelSettings
    images: torch.Tensor
    labels: torch.Tensor
    num_classes: int
    normalise: Normalise
    summed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def run(self, model: nn.Module) -> Any:
        """Forward and backward; returns when backward began.  Gradients stay, BatchNorm's statistics do not."""
        buffers = [buffer.clone() for buffer in model.buffers()]
        with model_errors(self.settings, self.images.shape):
            logits = model(self.normalise(self.images))
        check_logits(self.settings, logits, (len(self.labels), self.num_classes))
        loss = self.summed_loss(logits, self.labels.to(logits.device))
        began = now(loss.device)
        loss.backward()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return began

    def record(self, model: nn.Module, world: World) -> Backward:
        """When each gradient appears, on the rank on which it is last.  All ranks call it."""
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for _ in range(1 if world.num_ranks == 1 else 2):  # what is not recorded has warmed up
            with marking(parameters) as marks:
                began = self.run(model)
        unused = [name for name in parameters if name not in marks]
        if unused:
            raise UserError(
                f"model.name={self.settings.name!r}: no gradient reaches {', '.join(unused[:3])}"
                f"{' ...' * (len(unused) > 3)}; remove what forward does not use, or set requires_grad to False"
            )
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        ready_s = {name: seconds_between(began, mark) for name, mark in marks.items()}
        names, *_ = world.collect(list(ready_s))  # rank 0's order, as DDP takes it
        by_rank = world.collect([ready_s[name] for name in names])
        gradients = [gradient_of(parameters[name]) for name in names]
        for parameter in parameters.values():
            parameter.grad = None
        return Backward(names, gradients, [max(times_s) for times_s in zip(*by_rank, strict=True)])


@contextmanager
def marking(parameters: dict[str, nn.Parameter]) -> Iterator[dict[str, Any]]:
    """By name, when each gradient appeared; in their order."""
    marks: dict[str, Any] = {}
    names = {parameter: name for name, parameter in parameters.items()}

    def mark(parameter: torch.Tensor) -> None:
        marks[names[parameter]] = now(parameter.device)  # type: ignore[index]

    handles = [parameter.register_post_accumulate_grad_hook(mark) for parameter in parameters.values()]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()


def now(device: torch.device) -> Any:
    """A moment: on CUDA, of the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3)
