"""The script of docs/clusters.md, with commands that stand in for Slurm's: srun starts ranks and passes signals on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import wait_until

DOCS = Path(__file__).parents[2] / "docs"
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
step = dict(SLURM_NTASKS="2", SLURM_STEP_NODELIST="localhost", SLURM_STEP_TASKS_PER_NODE="2", SLURM_NODEID="0")
ranks = [
    subprocess.Popen(sys.argv[2:], env=os.environ | step | {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in range(2)
]
signal.signal(signal.SIGUSR1, lambda number, frame: [rank.send_signal(number) for rank in ranks])
sys.exit(max(rank.wait() for rank in ranks))
"""
MEGABATCH = f"""#!/bin/sh
exec {sys.executable} -m megabatch "$@"
"""
RECIPE = """
[model]
name = "small_cnn"
options = {width = 4}
[data]
source = "synthetic"
image_size = 8
synthetic = {train = 96, test = 24, classes = 10, channels = 3}
[batch]
global = 48
micro = 12
[optim]
name = "sgd"
learning_rate = 0.1
[train]
epochs = 400
evaluate_every = 0
[run]
threads = 1
"""


def documented_script() -> str:
    found = re.search(r"## Slurm\n```\n(.*?)```", (DOCS / "clusters.md").read_text(), re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job."""
    (tmp_path / "bin").mkdir()
    scontrol = f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n'
    for name, text in {"srun": SRUN, "scontrol": scontrol, "megabatch": MEGABATCH}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", str(os.getpid()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(RECIPE)
    (tmp_path / "job.sh").write_text(documented_script())
    return tmp_path


def test_a_job_that_loses_its_host_saves_and_is_requeued_and_then_resumes(slurm: Path) -> None:
    run = slurm / "runs" / str(os.getpid())
    job = subprocess.Popen(["bash", "job.sh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") > 3)
        (srun,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(srun), signal.SIGUSR1)
        output, errors = job.communicate(timeout=100)
    finally:
        job.kill()
    assert (job.returncode, errors) == (138, ""), output
    (line,) = [line for line in output.splitlines() if line.startswith("requeue")]
    assert "SIGUSR1 after step" in line and "exit code 138" in line
    assert (slurm / "scontrol.log").read_text() == f"requeue {os.getpid()}\n"
    again = subprocess.run(["bash", "job.sh"], capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert "resumes   after step" in again.stdout and "finished" in again.stdout
    assert (slurm / "scontrol.log").read_text().count("\n") == 1
