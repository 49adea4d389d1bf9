"""Ranks in the hosts of a cluster, as a user would start them: torchrun on every host, which meet over the network."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.hosts import Cluster
from megabatch.comm.launch import RankFailed, make_notes, reported_failure, sweep_notes

CHECKOUT = Path(__file__).parents[1]
MEETING_PORT = 29_400
TASK, RESULT = "task", "result"
LOOK_S = 0.1
FAILURE_TIMEOUT_S = 5.0  # what the ranks that have failed get to say so


def run_ranks(cluster: Cluster, ranks: Sequence[int], module: str, task: bytes) -> bytes:
    """Runs `python -m MODULE NOTES` as ranks[i] ranks on host i; they find the file TASK in the folder NOTES.

    Returns what rank 0 has left there in the file RESULT.
    """
    sweep_notes()
    with make_notes() as notes, ExitStack() as stack:
        (notes / TASK).write_bytes(task)
        launchers = []
        for index, num_ranks in enumerate(ranks):
            (notes / f"host{index}").mkdir()
            log = stack.enter_context((notes / f"host{index}" / "torchrun.log").open("w"))
            command = torchrun(cluster, index, len(ranks), num_ranks, notes)
            launchers.append(
                cluster.hosts[index].start(
                    [*command, module, str(notes)], env=environment(notes), stdout=log, stderr=log
                )
            )
        wait_for(launchers, notes)
        return (notes / RESULT).read_bytes()


def torchrun(cluster: Cluster, index: int, num_hosts: int, num_ranks: int, notes: Path) -> list[str]:
    options = {
        "nnodes": num_hosts,
        "nproc-per-node": num_ranks,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"{cluster.hosts[0].address}:{MEETING_PORT}",
        "rdzv-id": notes.name,
        "rdzv-conf": f"is_host={int(index == 0)}",
        "local-addr": cluster.hosts[index].address,
        "max-restarts": 0,
        "log-dir": notes / f"host{index}",
        "redirects": 3,  # what ranks write goes to files there
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-P", "-m", "torch.distributed.run", *words, "-m"]


def environment(notes: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(CHECKOUT)]))
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return os.environ | ours | {"TMPDIR": str(notes)}  # which goes, whatever ranks leave there


def wait_for(launchers: Sequence["subprocess.Popen[str]"], notes: Path) -> None:
    """All of them end well, or the first rank that has failed is heard."""
    while None in (codes := [launcher.poll() for launcher in launchers]) and not any(codes):
        time.sleep(LOOK_S)
    if any(codes):
        deadline_s = time.monotonic() + FAILURE_TIMEOUT_S
        while None in [launcher.poll() for launcher in launchers] and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        raise reported_failure(notes) or unreported_failure(notes)


def unreported_failure(notes: Path) -> RankFailed:
    """A rank that was killed, or that could not be started: what was written last is what there is."""
    logs = [path for path in notes.rglob("*.log") if path.stat().st_size]
    texts = [path.read_text() for path in sorted(logs, key=lambda path: path.name != "stderr.log")]
    trace = texts[0] if texts else ""
    return RankFailed(0, 1, "a rank has ended without a word; see above what it or its launcher wrote", trace)
