"""The script of docs/clusters.md with fake Slurm commands.

tests/lab/chaos/test_launchers.py runs it with real ones, but is skipped on machines without Slurm or root.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# Like Slurm 22.05: --kill-on-bad-exit ends the other ranks with SIGTERM, and the largest exit code is returned.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys, time
command = sys.argv[sys.argv.index("megabatch") :]
ranks = [subprocess.Popen(command, env=os.environ | {{"SLURM_PROCID": str(rank)}}) for rank in range(2)]
while None in [rank.poll() for rank in ranks]:
    if "--kill-on-bad-exit" in sys.argv and any(rank.poll() for rank in ranks):
        [rank.terminate() for rank in ranks]
    time.sleep(0.05)
sys.exit(max(code if code >= 0 else 128 - code for code in [rank.wait() for rank in ranks]))
"""
# Ends with the exit codes in a file, one per call.
SRUN_CODES = """#!/bin/sh
echo "$@" >> srun.log
code=$(head -n 1 codes)
sed -i 1d codes
exit $code
"""
# Fails on one rank before the other.
MEGABATCH = """#!/bin/sh
[ "$SLURM_PROCID" = 0 ] || sleep 0.5
exit 2
"""


def documented_script() -> str:
    found = re.search(r"## Slurm\n```\n(.*?)```", (DOCS / "clusters.md").read_text(), re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a job, with the fake commands in PATH."""
    (tmp_path / "bin").mkdir()
    scontrol = f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n'
    for name, text in {"srun": SRUN, "scontrol": scontrol, "megabatch": MEGABATCH}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", str(os.getpid()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(documented_script())
    return tmp_path


@pytest.mark.parametrize(
    ("codes", "restarts", "tries", "is_requeued"),
    [
        ([0], "", 1, False),
        ([137, 1, 0], "", 3, False),  # kill -9 of a rank, then a lost rank
        ([1, 1, 1, 1, 0], "", 4, False),  # the loop ends
        ([2, 0], "", 1, False),  # a mistake in the recipe
        ([138, 0], "", 1, True),
        ([143, 0], "7", 1, True),
        ([138, 0], "50", 1, False),  # perhaps the time limit is shorter than the start
    ],
)
def test_the_script_retries_failures_and_requeues_stopped_runs_within_bounds(
    codes: list[int], restarts: str, tries: int, is_requeued: bool, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm / "bin/srun").write_text(SRUN_CODES)
    (slurm / "codes").write_text("".join(f"{code}\n" for code in codes))
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    job = subprocess.run(["bash", "job.sh"], capture_output=True, text=True, timeout=100)
    assert (job.returncode, job.stderr) == (codes[tries - 1], "")
    assert len((slurm / "srun.log").read_text().splitlines()) == tries
    assert (slurm / "scontrol.log").exists() == is_requeued


def test_a_mistake_that_one_rank_reports_first_ends_the_job(slurm: Path) -> None:
    job = subprocess.run(["bash", "job.sh"], capture_output=True, text=True, timeout=100)
    assert (job.returncode, job.stderr) == (2, "")
    assert not (slurm / "scontrol.log").exists()


def test_the_script_for_gpus_is_the_one_for_clusters() -> None:
    scripts = [path.name for path in DOCS.glob("*.md") if "#SBATCH" in path.read_text()]
    assert scripts == ["clusters.md"]
