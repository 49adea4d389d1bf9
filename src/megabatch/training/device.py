"""Helpers for the device of a rank: a CPU or any accelerator of torch, such as cuda (NVIDIA, AMD) or xpu (Intel)."""

import torch

from megabatch.precision.policy import PrecisionSettings


def accelerator_name(device: torch.device) -> str:
    return str(torch.get_device_module(device).get_device_name(device))


def accelerator_names() -> list[str]:
    """Return the names of all accelerators that this process sees."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [accelerator_name(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count())]


def device_mb(device: torch.device) -> float | None:
    """Return the peak memory of tensors on an accelerator since the process started; None on a CPU."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_allocated(device) / 1e6


def synchronize(device: torch.device) -> None:
    """Wait until the device finished all launched kernels.  On a CPU, return at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and the device, in a tenth of the time of torch.manual_seed."""
    torch.default_generator.manual_seed(seed)
    of_device = torch.get_device_module(device)
    if device.type != "cpu" and of_device.is_initialized():
        of_device.manual_seed(seed)


def gpu_uuid(device: torch.device) -> str | None:
    """Return the identity of an NVIDIA GPU; None for other devices."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


TF32_SINCE = (8, 0)  # compute capability: Ampere


def warn_of_device(precision: PrecisionSettings, device_type: str) -> list[str]:
    """Return a warning if the device computes far slower in this precision than it could.

    Most CPUs lack fp16 instructions and convert every number.  A GPU does not use its tensor cores for fp32.
    """
    formats = precision.formats
    if device_type == "cpu" and (formats.autocast or formats.model) == torch.float16:
        return [
            f"precision.name={precision.name} computes in fp16, which most CPUs emulate, about 10 times slower than "
            "fp32; on a CPU set precision.name=fp32, or bf16 if the CPU supports it"
        ]
    multiplies_in_fp32 = formats.model == torch.float32 and not formats.autocast and not formats.allows_tf32
    if device_type == "cuda" and multiplies_in_fp32 and has_tf32():
        return [
            f"precision.name={precision.name} leaves TF32 off, so this GPU does not use its tensor cores; set "
            "precision.name=tf32 to multiply faster with 10 bits of mantissa, or amp for 16 bits"
        ]
    return []


def has_tf32() -> bool:
    """Return whether the current GPU can multiply in TF32.  Those of AMD are called cuda too, but have no TF32."""
    is_nvidia = torch.version.hip is None and torch.cuda.is_available()
    return is_nvidia and torch.cuda.get_device_capability() >= TF32_SINCE
