"""Work on a rank's own device, whichever is the current one: a script need not have called set_device."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """What is opened inside, and collectives of torch.distributed that choose a device, take this one."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
