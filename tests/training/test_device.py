import torch

from megabatch.training.device import accelerator_names, device_mb, wait_for
from megabatch.training.screen import describe_memory


def test_a_cpu_is_no_accelerator() -> None:
    cpu = torch.device("cpu")
    wait_for(cpu)
    assert device_mb(cpu) is None
    assert len(accelerator_names()) == torch.accelerator.device_count()


def test_the_memory_of_an_accelerator_is_said_where_there_is_one() -> None:
    assert describe_memory(1234.5, None) == "1,234 MB of rank 0"
    assert describe_memory(1234.5, 20480.0) == "1,234 MB of rank 0, and at most 20,480 MB of its GPU"
