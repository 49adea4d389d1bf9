"""A launcher with two ranks that simulate training without torch: FOLDER STEPS MAX_RESTARTS FLAW FAULTS PLACE.

Rank 0 writes the files of a run: log, rows, a checkpoint every few steps, weights.  It imports no megabatch code.

The script waits for every expected fault, so a late fault on a busy machine changes nothing.  It waits at PLACE:
in a `step`, or in the `write` of a checkpoint.  At `start-up` it waits for a file named `released`, then in a step,
and its launcher exits after a delay.
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
num_faults, place = int(sys.argv[5]), sys.argv[6]
run = folder / "run"
FIRST_WAIT, STEPS_BETWEEN = 9, 10  # steps at which it waits for a fault
DELAY_S = 0.5 if place == "start-up" else 0.0  # before the launcher exits


def save(path: Path, value: float) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", value))


def wait_for_fault() -> None:
    while True:
        time.sleep(1)


def write(path: Path, text: str, is_struck: bool = False) -> None:
    """Replace the file atomically: a kill leaves the old or the new text, except with the flaw that chaos must find."""
    # chaos recognises writes by the prefix .writing-, which only the write to be struck has.
    name = f".writing-{path.name}" if is_struck else f".{path.name}"
    unfinished = path if flaw == "tears checkpoints" else path.with_name(name)
    with unfinished.open("w") as file:
        if is_struck:
            wait_for_fault()
        file.write(text)
    unfinished.replace(path)


def die_with_launcher() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["LAUNCHER"]):  # the launcher died before prctl
        os._exit(1)


def train() -> None:
    state, rows = run / "checkpoints/state", run / "metrics.jsonl"
    (run / "checkpoints/last").mkdir(parents=True, exist_ok=True)
    (run / "checkpoints/.writing-state").unlink(missing_ok=True)
    first = int(state.read_text()) if state.exists() else 0
    known = rows.read_text().splitlines(keepends=True) if rows.exists() else []
    write(rows, "".join(known if flaw == "repeats rows" else known[:first]))
    while place == "start-up" and not (folder / "released").exists():
        time.sleep(0.01)
    with (run / "train.log").open("a") as log:
        log.write(f"today begins at step {first}\n")
    resumptions = (run / "train.log").read_text().count("begins") - 1
    row = json.loads((folder / "row").read_text())
    waits_at = FIRST_WAIT + STEPS_BETWEEN * resumptions if resumptions < num_faults else None
    for step in range(first + 1, num_steps + 1):
        time.sleep(0.01)
        if step == waits_at and place != "write":
            wait_for_fault()
        if flaw == "fails later" and resumptions and step == num_steps - 1:
            sys.exit(1)
        with rows.open("a") as file:
            file.write(json.dumps(row | {"step": step, "loss": 1 / step}) + "\n")
        if step % 5 == 0:
            write(state, str(step), is_struck=waits_at is not None and step > waits_at and place == "write")
    value = 1.0 + resumptions if flaw == "drifts" else 1.0
    for path in (run / "model.safetensors", run / "checkpoints/last/state.safetensors"):
        save(path, value)
    (run / "summary.json").write_text((folder / "summary").read_text())


def describe_end(rank: "subprocess.Popen[bytes]") -> str:
    code = rank.poll()
    if code is None:
        return "is stopped"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def is_stopped(rank: "subprocess.Popen[bytes]") -> bool:
    return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def has_failed(rank: "subprocess.Popen[bytes]") -> bool:
    code = rank.poll()
    return is_stopped(rank) if code is None else code != 0


def end_at_once(number: int, frame: object) -> None:
    time.sleep(DELAY_S)
    os._exit(128 + number)  # the kernel then kills the ranks


def launch() -> None:
    if flaw == "litters":
        (Path(os.environ["TMPDIR"]) / "litter").touch()
    signal.signal(signal.SIGTERM, end_at_once)
    for _ in range(max_restarts + 1):
        variables = os.environ | {"LAUNCHER": str(os.getpid())}
        command = [sys.executable, "-I", "-S", *sys.argv]
        ranks = [subprocess.Popen(command, env=variables | {"RANK": rank}) for rank in "01"]
        while ranks[0].poll() is None and ranks[1].poll() is None:
            time.sleep(0.01)
            if any(map(is_stopped, ranks)) and flaw != "hangs":
                break
        time.sleep(DELAY_S)
        failed = next((number for number in (1, 0) if has_failed(ranks[number])), None)
        cause = "" if failed is None else describe_end(ranks[failed])
        for rank in ranks:
            rank.kill()
            rank.wait()
        if failed is None:
            return
        if flaw != "prints no message":
            print(f"megabatch: rank {failed}: {cause}", file=sys.stderr, flush=True)
    sys.exit(1)


if "RANK" not in os.environ:
    launch()
else:
    if flaw != "orphans":
        die_with_launcher()
    train() if os.environ["RANK"] == "0" else wait_for_fault()
