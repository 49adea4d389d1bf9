"""Scripts that attach end as they would without: promptly, with their exit code, and without an abort."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks  # starts processes

PAGE = Path(__file__).parents[2] / "docs" / "attach.md"
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from megabatch.comm import attach


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("the middle of backward")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)

    def forward(self, x, fails):
        x = self.first(x)
        return self.second(Fails.apply(x) if fails else x)


algorithms, rank, store, raises = sys.argv[1].split(), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "raises"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
models = [DistributedDataParallel(Net(), bucket_cap_mb=1) for algorithm in algorithms]
attached = [attach(ddp, algorithm=algorithm) for ddp, algorithm in zip(models, algorithms)]
for step in range(4):
    if step == 1 and os.fork() == 0:
        sys.exit(0)  # a child process that runs the atexit functions
    for ddp in models:
        fails = raises and step == 2
        loss = ddp(torch.ones(2, 600), fails and rank == 1).sum()
        if fails and rank == 0:
            time.sleep(2)  # so that rank 1 waits for this one in its first bucket while it fails before its second
        loss.backward()
if rank == 0:
    dist.destroy_process_group()
print("done")
"""


def run(algorithms: str, folder: Path, ending: str) -> list[tuple[int, str, str]]:
    """Return the exit code, stdout and stderr of both ranks of a script with a model per algorithm."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), algorithms, str(rank), str(folder / "store"), ending],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def test_script_may_end_without_close(tmp_path: Path) -> None:
    """Rank 0 destroys the process group, rank 1 does not."""
    for code, out, err in run("flat auto", tmp_path, "ends"):
        assert (code, out) == (0, "done\n"), err
        assert "terminate called" not in err and "Traceback" not in err


@pytest.mark.parametrize("algorithm", ["auto", "flat"])
def test_script_that_raises_ends_on_both_ranks(algorithm: str, tmp_path: Path) -> None:
    """The timeout is ten minutes, so this test would fail if a rank waited for it."""
    (code, _, err), (failed, _, failure) = run(algorithm, tmp_path, "raises")
    assert code == failed == 1
    assert "ValueError: the middle of backward" in failure
    assert re.search(r"MissingRank: step 2, bucket [01]: .*rank 1 (has left|has died|does not respond)", err), err
    assert "terminate called" not in err + failure


def test_script_of_the_docs_runs_under_torchrun(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    script = tmp_path / "train.py"
    script.write_text(blocks[0])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"loss ([\d.]+), shared_memory: all_reduce in the node\n", done.stdout)
    assert found and float(found[1]) < 1, done.stdout
