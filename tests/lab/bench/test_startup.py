import json
import subprocess
import sys
from pathlib import Path

import pytest
from megabatch_lab.bench import startup
from megabatch_lab.rehearsal import fake_cuda

from megabatch.errors import UserError


@pytest.mark.skipif(fake_cuda.why_not() is not None, reason=str(fake_cuda.why_not()))
def test_bench_startup_finds_nothing_that_grows_but_a_few_bytes_a_rank(tmp_path: Path) -> None:
    """In a process of its own, since it gives itself a CUDA."""
    path = tmp_path / "bench.json"
    command = [sys.executable, "-m", "megabatch", "bench", "startup", "--ranks", "16,512", "--rounds", "1"]
    result = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    few, many = json.loads(path.read_text())["rows"]
    assert (few["ranks"], many["ranks"]) == (16, 512)
    assert few["store_requests"] == many["store_requests"] < 10
    assert many["bytes"] - few["bytes"] < 40 * (512 - 16) + 2_000  # the text of the choice of plans is not the same
    assert few["bytes_a_rank"] == many["bytes_a_rank"] == 32
    assert few["syncs_per_step"] == many["syncs_per_step"] == 0
    assert "bytes grow by" in result.stdout


@pytest.mark.parametrize(
    ("is_rocm", "has_gpu", "has_compiler", "needs"),
    [
        (True, False, True, r"a CPU or CUDA build of torch: this one is for ROCm"),
        (False, True, True, r"a machine without a GPU: hide it with CUDA_VISIBLE_DEVICES="),
        (False, False, False, r"g\+\+: install it"),
    ],
)
def test_where_nothing_can_be_rehearsed_the_bench_is_one_line(
    monkeypatch: pytest.MonkeyPatch, is_rocm: bool, has_gpu: bool, has_compiler: bool, needs: str
) -> None:
    monkeypatch.setattr(fake_cuda.torch.version, "hip", "7.0" if is_rocm else None)
    monkeypatch.setattr(fake_cuda, "HAS_GPU", has_gpu)
    monkeypatch.setattr(fake_cuda.shutil, "which", lambda name: name if has_compiler else None)
    with pytest.raises(UserError, match=rf"^bench startup rehearses CUDA on the CPU and needs {needs}$"):
        startup.run([8], 1, None)


def test_numbers_of_ranks_fill_nodes() -> None:
    assert startup.read_numbers("8,256,2048") == [8, 256, 2048]
    for wrong in ("", "8,", "12", "0", "-8", "many"):
        with pytest.raises(UserError, match=r"must be numbers with commas, each a multiple of 8 ranks to a node$"):
            startup.read_numbers(wrong)
