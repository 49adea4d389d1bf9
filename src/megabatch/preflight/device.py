"""What the device of a run is slow at."""

import torch

from megabatch.precision.policy import PrecisionSettings


def warn_of_device(precision: PrecisionSettings, device_type: str) -> list[str]:
    """A line, if the run would compute in fp16 on a CPU: most have no instructions for it, and convert every number."""
    computes_in = precision.formats.autocast or precision.formats.model
    if device_type != "cpu" or computes_in != torch.float16:
        return []
    return [
        f"precision.name={precision.name} computes in fp16, which most CPUs emulate, about 10 times slower than fp32; "
        "on a CPU give precision.name=fp32, or bf16 where the CPU has it"
    ]
