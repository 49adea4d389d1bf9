import torch

from megabatch.training.device import accelerator_names, device_mb, synchronize
from megabatch.training.screen import describe_memory


def test_a_cpu_is_not_an_accelerator() -> None:
    cpu = torch.device("cpu")
    synchronize(cpu)
    assert device_mb(cpu) is None
    assert len(accelerator_names()) == torch.accelerator.device_count()


def test_accelerator_memory_is_described_if_there_is_one() -> None:
    assert describe_memory(1234.5, None) == "1.234 GB on rank 0"
    assert describe_memory(1234.5, 20480.0) == "1.234 GB on rank 0, at most 20.48 GB on its GPU"
