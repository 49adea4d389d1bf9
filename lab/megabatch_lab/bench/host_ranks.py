"""Start ranks on the hosts of a cluster as a user would: torchrun on every host, with a rendezvous over the network."""

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
MASTER_PORT = 29_400
TASK, RESULT = "task", "result"
POLL_S = 0.1
FAILURE_TIMEOUT_S = 5.0  # for the other ranks to report their failures
LOG = "torchrun.log"
KILLED = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)")  # printed by torchrun


def run_ranks(cluster: Cluster, ranks: Sequence[int], module: str, task: bytes) -> bytes:
    """Run `python -m MODULE SCRATCH` as ranks[i] ranks on host i, with `task` in the file TASK of the folder SCRATCH.

    Return the contents of the file RESULT that rank 0 wrote there.
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
        finally:  # before the folder is removed: ranks may be writing to it
            for namespace, launcher in zip(cluster.hosts, launchers, strict=False):
                end_processes(namespace.name)
                launcher.wait()
        return (scratch / RESULT).read_bytes()


def folder_of(host: int, scratch: Path) -> Path:
    return scratch / f"host{host}"


def torchrun(cluster: Cluster, host: int, num_ranks: int, scratch: Path) -> list[str]:
    options = {
        "nnodes": len(cluster.hosts),
        "nproc-per-node": num_ranks,
        "node-rank": host,
        "rdzv-backend": "static",  # the other backends unpickle data from a port
        "master-addr": cluster.hosts[0].address,
        "master-port": MASTER_PORT,
        "max-restarts": 0,
        "log-dir": folder_of(host, scratch),
        "redirects": 3,  # stdout and stderr of ranks go to files in log-dir
    }
    return [sys.executable, "-P", "-m", "torch.distributed.run", *(f"--{name}={x}" for name, x in options.items())]


def environment(scratch: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(CHECKOUT)]))
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return os.environ | ours | {"TMPDIR": str(scratch)}  # removed at the end with all files of the ranks


def wait_for(launchers: Sequence["subprocess.Popen[str]"], ranks: Sequence[int], scratch: Path) -> None:
    """Wait until all have ended, and raise the error of the first rank that failed."""
    while None in (codes := [launcher.poll() for launcher in launchers]) and not any(codes):
        time.sleep(POLL_S)
    if any(codes):
        deadline_s = time.monotonic() + FAILURE_TIMEOUT_S
        while None in [launcher.poll() for launcher in launchers] and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        raise first_failure(ranks, scratch)


def first_failure(ranks: Sequence[int], scratch: Path) -> RankFailed:
    """Return the first failure.  A rank that was killed is the cause of the errors of other ranks."""
    for host, num_before in enumerate(accumulate(ranks, initial=0)):
        log = folder_of(host, scratch) / LOG
        killed = KILLED.search(log.read_text()) if log.exists() else None
        if killed:
            number, local_rank = map(int, killed.groups())
            return RankFailed(num_before + local_rank, 1, f"was ended by {signal.Signals(number).name}")
    for path in scratch.rglob("error.json"):  # written by torchelastic for the first rank that failed
        report = json.loads(path.read_text())
        if "trace" in report:  # otherwise torchelastic has no error of the rank
            return RankFailed(report["rank"], report["exit_code"], report["message"], report["trace"])
    # A rank could not start, or could not join the others.
    logs = sorted((path for path in scratch.rglob("*.log") if path.stat().st_size), key=lambda path: path.name == LOG)
    return RankFailed(
        0, 1, "a rank ended without an error message; its log is above", logs[0].read_text() if logs else ""
    )
