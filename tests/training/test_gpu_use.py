"""GPU telemetry from a fake NVML (lab/megabatch_lab/rehearsal/fake_nvml.cpp)."""

import shutil
from pathlib import Path

import msgspec
import pytest

from megabatch.runs.records import GpuUse
from megabatch.training import gpu_use
from megabatch.training.gpu_use import GpuSampler
from tests.support.rehearsals import build_nvml


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("needs g++: install it")
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def state(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_use, "LIBRARY", str(library))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus"))
    return tmp_path / "gpus"


def test_samples_are_averaged_and_errors_counted_since_the_start(state: Path) -> None:
    state.write_text("GPU-a 10 1000 1 0 1 0 0\nGPU-b 100 400000 1410 0 60 5 0\n")
    sampler = GpuSampler("b")
    sampler.sample()
    state.write_text(f"GPU-b 50 200000 1110 {0x64} 84 7 2\n")  # heat, by two bits, and the power cap
    sampler.sample()
    expected = GpuUse(
        utilization=0.75,
        power_w=300.0,
        clock_mhz=1260.0,
        temperature_c=84,
        slowed={"heat": 0.5, "power cap": 0.5},
        ecc_errors=2,
        xid_errors=2,
    )
    taken = sampler.take()
    assert taken == expected
    assert msgspec.json.decode(msgspec.json.encode(taken), type=GpuUse) == expected
    assert sampler.take() is None  # no samples since
    sampler.sample()
    later = sampler.take()
    assert later and (later.utilization, later.slowed, later.xid_errors) == (0.5, {"heat": 1.0, "power cap": 1.0}, 2)


def test_values_that_a_gpu_does_not_support_are_missing(state: Path) -> None:
    state.write_text("GPU-a -1 -1 -1 -1 -1 -1 0\n")
    sampler = GpuSampler("a")
    sampler.sample()
    assert sampler.take() == GpuUse()


@pytest.mark.parametrize("missing", ["library", "driver", "gpu", "uuid"])
def test_without_nvml_nothing_is_sampled(state: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    state.write_text("GPU-a 1 1 1 1 1 1 0\n")
    if missing == "library":
        monkeypatch.setattr(gpu_use, "LIBRARY", str(state.with_name("libnone.so")))
    if missing == "driver":
        monkeypatch.delenv("FAKE_NVML")
    uuid = {"gpu": "other", "uuid": None}.get(missing, "a")
    with GpuSampler(uuid) as sampler:
        assert sampler.take() is None and not sampler.thread.is_alive()


def test_thread_samples_until_the_context_ends(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.write_text("GPU-a 30 1000 500 0 40 0 0\n")
    monkeypatch.setattr(gpu_use, "INTERVAL_S", 0.001)
    with GpuSampler("a") as sampler:
        taken = None
        while taken is None:
            taken = sampler.take()
    sampler.thread.join(10)
    assert not sampler.thread.is_alive() and taken.clock_mhz == 500
