"""A copy of a training state in the host's memory, so that the next step may change what it was copied from.

On an accelerator the copies are launched behind the step, into pinned memory, and the host does not wait for them: the
next step's kernels come after them on the same stream.  The memory is used again for the next copy: memory that was
never written to takes several times as long to fill, so `reserve` writes to it while nobody waits.
"""

import numpy as np
import torch

from megabatch.train.tensor_file import AS_INTEGERS

CHUNK = 1 << 20  # elements that are looked at at a time


class Snapshot:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.events: list[torch.Event] = []  # before and after the copies, on an accelerator

    def reserve(self, state: dict[str, torch.Tensor]) -> None:
        """Memory for what looks like `state`."""
        self.tensors = {name: memory_for(tensor) for name, tensor in state.items()}
        for tensor in self.tensors.values():
            tensor.view(AS_INTEGERS[tensor.dtype.itemsize]).numpy().fill(0)

    @torch.no_grad()
    def take(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = {name: memory_for(tensor, self.tensors.get(name)) for name, tensor in state.items()}
        device = next((tensor.device for tensor in state.values() if tensor.device.type != "cpu"), None)
        self.events = [torch.Event(device, enable_timing=True) for _ in range(2)] if device else []
        for event in self.events[:1]:
            event.record()
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor, non_blocking=True)
        for event in self.events[1:]:
            event.record()

    def wait(self) -> float:
        """Until all of it is here; the seconds for which the device was busy with it."""
        if not self.events:
            return 0.0
        began, ended = self.events
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


def memory_for(tensor: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """As the tensor lies: a copy that also reorders would take longer."""
    layout = (tensor.shape, tensor.stride(), tensor.dtype)
    if before is not None and layout == (before.shape, before.stride(), before.dtype):
        return before
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu", requires_grad=False)


def is_finite(tensor: torch.Tensor) -> bool:
    """By numpy, which takes no threads from those that compute; what it does not know is widened first."""
    if not tensor.is_floating_point():
        return True
    if tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    values = tensor.numpy().ravel(order="K")
    return all(np.isfinite(values[begin : begin + CHUNK]).all() for begin in range(0, len(values), CHUNK))
