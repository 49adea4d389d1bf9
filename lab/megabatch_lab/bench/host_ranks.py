"""Ranks in the hosts of a cluster, as a user would start them: torchrun on every host, which meet over the network."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from megabatch.ranks.failures import RankFailed
from megabatch_lab.bench.hosts import Cluster
from megabatch_lab.chaos.namespaces import end_processes

CHECKOUT = Path(__file__).parents[3]
MEETING_PORT = 29_400
TASK, RESULT = "task", "result"
LOOK_S = 0.1
FAILURE_TIMEOUT_S = 5.0  # what the ranks that have failed get to say so
LOG = "torchrun.log"
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")  # as torchrun says it


def run_ranks(cluster: Cluster, ranks: Sequence[int], module: str, task: bytes) -> bytes:
    """Runs `python -m MODULE SCRATCH` as ranks[i] ranks on host i; they find the file TASK in the folder SCRATCH.

    Returns what rank 0 has left there in the file RESULT.
    """
    with TemporaryDirectory(prefix="megabatch-") as folder:
        scratch = Path(folder)
        (scratch / TASK).write_bytes(task)
        launchers: list[subprocess.Popen[str]] = []
        try:
            for host, num_ranks in enumerate(ranks):
                folder_of(host, scratch).mkdir()
                command = [*torchrun(cluster, host, num_ranks, scratch), "-m", module, str(scratch)]
                with (folder_of(host, scratch) / LOG).open("w") as log:
                    launchers.append(
                        cluster.hosts[host].start(command, env=environment(scratch), stdout=log, stderr=log)
                    )
            wait_for(launchers, ranks, scratch)
        finally:  # before the folder goes, in which ranks may be writing
            for host, launcher in zip(cluster.hosts, launchers, strict=False):
                end_processes(host.name)
                launcher.wait()
        return (scratch / RESULT).read_bytes()


def folder_of(host: int, scratch: Path) -> Path:
    return scratch / f"host{host}"


def torchrun(cluster: Cluster, host: int, num_ranks: int, scratch: Path) -> list[str]:
    options = {
        "nnodes": len(cluster.hosts),
        "nproc-per-node": num_ranks,
        "node-rank": host,
        "rdzv-backend": "static",  # the others unpickle what they find at a port
        "master-addr": cluster.hosts[0].address,
        "master-port": MEETING_PORT,
        "max-restarts": 0,
        "log-dir": folder_of(host, scratch),
        "redirects": 3,  # what ranks write goes to files there
    }
    return [sys.executable, "-P", "-m", "torch.distributed.run", *(f"--{name}={x}" for name, x in options.items())]


def environment(scratch: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(CHECKOUT)]))
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return os.environ | ours | {"TMPDIR": str(scratch)}  # which goes, whatever ranks leave there


def wait_for(launchers: Sequence["subprocess.Popen[str]"], ranks: Sequence[int], scratch: Path) -> None:
    """All of them end well, or the first rank that has failed is heard."""
    while None in (codes := [launcher.poll() for launcher in launchers]) and not any(codes):
        time.sleep(LOOK_S)
    if any(codes):
        deadline_s = time.monotonic() + FAILURE_TIMEOUT_S
        while None in [launcher.poll() for launcher in launchers] and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        raise first_failure(ranks, scratch)


def first_failure(ranks: Sequence[int], scratch: Path) -> RankFailed:
    """A rank that was killed is the cause of whatever others have reported."""
    for host, num_before in enumerate(accumulate(ranks, initial=0)):
        log = folder_of(host, scratch) / LOG
        killed = KILLED.search(log.read_text()) if log.exists() else None
        if killed:
            number, local_rank = map(int, killed.groups())
            return RankFailed(num_before + local_rank, 1, f"was ended by {signal.Signals(number).name}")
    for path in scratch.rglob("error.json"):  # torchelastic's, of the first rank that failed
        report = json.loads(path.read_text())
        if "trace" in report:  # and not one that torchelastic has written itself
            return RankFailed(report["rank"], report["exit_code"], report["message"], report["trace"])
    # It could not even be started, or could not join the others.
    logs = sorted((path for path in scratch.rglob("*.log") if path.stat().st_size), key=lambda path: path.name == LOG)
    return RankFailed(0, 1, "a rank ended without a word; its log is above", logs[0].read_text() if logs else "")
