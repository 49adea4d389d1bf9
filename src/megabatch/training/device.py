"""The accelerator of a rank, of whatever kind: what torch calls cuda (NVIDIA's and AMD's), xpu (Intel's)."""

import torch

from megabatch.precision.policy import PrecisionSettings


def accelerator_name(device: torch.device) -> str:
    return str(torch.get_device_module(device).get_device_name(device))


def accelerator_names() -> list[str]:
    """Of all that this process sees."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [accelerator_name(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count())]


def device_mb(device: torch.device) -> float | None:
    """The most that tensors have taken on an accelerator since the process began; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_allocated(device) / 1e6


def wait_for(device: torch.device) -> None:
    """Until everything that was launched on it has been done; on a CPU it has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_dropout(seed: int, device: torch.device) -> None:
    """What torch.manual_seed does for the generators that we use, in a tenth of its time."""
    torch.default_generator.manual_seed(seed)
    of_device = torch.get_device_module(device)
    if device.type != "cpu" and of_device.is_initialized():
        of_device.manual_seed(seed)


# What the device of a run is slow at.


def warn_of_device(precision: PrecisionSettings, device_type: str) -> list[str]:
    """A line, if the run would compute in fp16 on a CPU: most have no instructions for it, and convert every number."""
    computes_in = precision.formats.autocast or precision.formats.model
    if device_type != "cpu" or computes_in != torch.float16:
        return []
    return [
        f"precision.name={precision.name} computes in fp16, which most CPUs emulate, about 10 times slower than fp32; "
        "on a CPU give precision.name=fp32, or bf16 where the CPU has it"
    ]
