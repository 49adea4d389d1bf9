"""A launcher with two ranks that pretend to train, without torch: FOLDER STEPS MAX_RESTARTS FLAW.

Rank 0 writes what a run writes: log, rows, a checkpoint every few steps, weights.  It imports nothing of ours.
"""

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

folder, num_steps, max_restarts, flaw = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
run = folder / "run"


def save(path: Path, value: float) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", value))


def train() -> None:
    if flaw != "orphans":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its launcher
    state, rows = run / "checkpoint", run / "metrics.jsonl"
    (run / "checkpoints/last").mkdir(parents=True, exist_ok=True)
    first = int(state.read_text()) if state.exists() else 0
    known = rows.read_text().splitlines(keepends=True) if rows.exists() else []
    rows.write_text("".join(known if flaw == "repeats rows" else known[:first]))
    with (run / "train.log").open("a") as log:
        log.write(f"today begins at step {first}\n")
    resumptions = (run / "train.log").read_text().count("begins") - 1
    row = json.loads((folder / "row").read_text())
    for step in range(first + 1, num_steps + 1):
        time.sleep(0.01)
        if flaw == "fails later" and resumptions and step == num_steps - 1:
            sys.exit(1)
        with rows.open("a") as file:
            file.write(json.dumps(row | {"step": step, "loss": 1 / step}) + "\n")
        if step % 5 == 0:
            state.write_text(str(step))
    value = 1.0 + resumptions if flaw == "drifts" else 1.0
    for path in (run / "model.safetensors", run / "checkpoints/last/state.safetensors"):
        save(path, value)
    (run / "summary.json").write_text((folder / "summary").read_text())


def is_stopped(rank: "subprocess.Popen[bytes]") -> bool:
    return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def launch() -> None:
    if flaw == "litters":
        (Path(os.environ["TMPDIR"]) / "litter").touch()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))  # and the kernel kills the ranks
    for _ in range(max_restarts + 1):
        ranks = [subprocess.Popen([sys.executable, "-I", "-S", *sys.argv], env=os.environ | {"RANK": r}) for r in "01"]
        while ranks[0].poll() is None and ranks[1].poll() is None:
            time.sleep(0.01)
            if any(map(is_stopped, ranks)) and flaw != "hangs":
                break
        failed = 1 if ranks[1].poll() or ranks[0].poll() is None else 0
        has_failed = ranks[0].poll() != 0
        for rank in ranks:
            rank.kill()
            rank.wait()
        if not has_failed:
            return
        if flaw != "says nothing":
            print(f"megabatch: rank {failed}: ended", file=sys.stderr, flush=True)
    sys.exit(1)


if "RANK" not in os.environ:
    launch()
elif os.environ["RANK"] == "0":
    train()
else:
    if flaw != "orphans":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    while True:
        time.sleep(1)
