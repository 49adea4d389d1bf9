from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabatch.config.loading import load_config, silent
from megabatch.training import prepare
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


@pytest.mark.parametrize(("device", "share", "decoding"), [("cpu", 16, 16), ("cuda", 16, 14), ("cuda", 2, 1)])
def test_two_cores_of_a_rank_with_a_gpu_do_not_decode(
    monkeypatch: pytest.MonkeyPatch, device: str, share: int, decoding: int
) -> None:
    monkeypatch.setattr(prepare, "share_of_cores", lambda world: (share, [0]))
    monkeypatch.setattr(torch, "set_num_threads", int)
    world: Any = SimpleNamespace(device=torch.device(device))
    for settings, expected in (([], decoding), (["run.decode_threads=5"], 5)):
        config, _ = prepare.share_cores(load_config("smoke", settings, report=silent), world)
        assert (config.run.threads, config.run.decode_threads) == (share, expected)
