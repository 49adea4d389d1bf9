import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from megabatch_lab.bench import hosts as bench_hosts
from megabatch_lab.bench.cluster import ClusterRequest, Task, read_request, require_planned_bytes, run
from megabatch_lab.bench.gradient_sets import GradientSet, gradient_sizes
from megabatch_lab.bench.host_ranks import CHECKOUT, run_ranks
from megabatch_lab.bench.hosts import hosts
from megabatch_lab.chaos.namespaces import NAMESPACES, Host, started_at, sweep
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.ranks.failures import RankFailed


def request(
    ranks: str | None = None, *, num_hosts: int = 2, gbps: str | None = None, comm_dtype: str | None = None
) -> ClusterRequest:
    return read_request(num_hosts, ranks, gbps, comm_dtype, ["resnet18"], False, False)


def test_ranks_per_host_is_one_number_or_one_per_host() -> None:
    assert request("2,4,2+1").setups == [(2, 2), (4, 4), (2, 1)]
    assert request("3,1+2+3", num_hosts=3).setups == [(3, 3, 3), (1, 2, 3)]
    assert request().setups == [(2, 2), (4, 4)] and request().rates_gbps == [1.0, 2.5]
    assert request(gbps="0.5,10", comm_dtype="bf16").rates_gbps == [0.5, 10.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hosts 5", "--hosts=5 must be 2 to 4; nearest: --hosts=4"),
        ("--hosts 1", "--hosts=1 must be 2 to 4; nearest: --hosts=2"),
        ("--ranks-per-host 5", "must have 1 to 4 ranks; nearest: --ranks-per-host=4"),
        ("--ranks-per-host 2+0", "must have 1 to 4 ranks; nearest: --ranks-per-host=2+1"),
        ("--ranks-per-host 2+1+1", "3 numbers for 2 hosts; give 2 numbers, or --hosts=3"),
        ("--ranks-per-host 2,x", "--ranks-per-host='x' must be a number, or one number per host joined by +"),
        ("--ranks-per-host 2,,4", "--ranks-per-host='' must be a number"),
        ("--gbps fast", "--gbps='fast' must be numbers"),
        ("--gbps nan", "--gbps=nan must be 0.01 to 100"),
        ("--gbps 1000", "--gbps=1000 must be 0.01 to 100; nearest: --gbps=100"),
        ("--comm-dtype same,fp8", "--comm-dtype='fp8' is not one of same, bf16, fp16; nearest: --comm-dtype="),
        ("--model resnet51", "--model='resnet51' is not one of"),
        ("--train --compare", "--train always trains alexnet_bn and cannot be combined with --compare"),
        ("--train --model alexnet", "--train always trains alexnet_bn and cannot be combined with --model"),
        ("--train --ranks-per-host 4", "has 8 ranks; the limit is 4: use --hosts=2 --ranks-per-host=2"),
    ],
)
def test_invalid_options_fail_before_anything_starts(options: str, message: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "cluster", *options.split()])
    assert isinstance(refused.exception, UserError), refused.output
    assert message in str(refused.exception) and "\n" not in str(refused.exception)


def test_missing_root_and_iproute2_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    refused = CliRunner().invoke(app, ["bench", "cluster"])
    assert isinstance(refused.exception, UserError)
    assert "needs root and tc; run it as root, with iproute2" in str(refused.exception)


def test_gradient_set_has_the_models_shapes_in_backward_order() -> None:
    sizes = gradient_sizes("resnet50")
    assert len(sizes) == 161 and sizes[:2] == [1000, 2048 * 1000] and sizes[-1] == 64 * 3 * 7 * 7
    gradients = GradientSet([3, 16, 5])
    assert [bucket.num_bytes for bucket in gradients.described] == [12, 64, 20]
    assert [len(gradients.bucket(indices)) for indices in ([0], [1, 2], [0, 1, 2])] == [16, 32, 48]
    for wrong in (None, 1):
        gradients.fill(0)
        total = gradients.flat.clone()
        gradients.fill(1)
        gradients.flat += total
        if wrong is None:
            gradients.check(2, 1.0)
            assert gradients.flat.eq(0).all()
        else:
            gradients.flat[wrong] += 1
            with pytest.raises(AssertionError):
                gradients.check(2, 1.0)


def test_unplanned_traffic_fails_the_bench() -> None:
    row = {"model": "resnet50", "gbps": 1.0, "ranks_per_host": 2, "comm_dtype": "same", "bytes_planned": 100_000_000}
    require_planned_bytes(row | {"bytes_counted": 100_300_000.0})
    for counted in (0.0, 90_000_000.0, 110_000_000.0):
        with pytest.raises(SystemExit, match=r"sent [\d,]+ bytes.*planned 100,000,000"):
            require_planned_bytes(row | {"bytes_counted": counted})


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skip if network namespaces cannot be created: not root, or no kernel support."""
    try:
        with hosts(2, 1.0):
            pass
    except UserError as error:
        pytest.skip(f"needs root and iproute2: {error}")


def names_of(process: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"mb{process}-*")]


def processes_in(names: list[str]) -> list[int]:
    found = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout for name in names]
    return [int(process) for text in found for process in text.split()]


def bytes_sent(name: str) -> int:
    cards = subprocess.run(["ip", "netns", "exec", name, "cat", "/proc/net/dev"], capture_output=True, text=True).stdout
    return next(int(line.split()[9]) for line in cards.splitlines() if line.strip().startswith("eth0:"))


def is_running(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("namespaces")
def test_two_unequal_hosts_reduce_exactly_and_send_the_planned_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arm checks its results, and `run` compares the bytes."""
    monkeypatch.setattr(bench_hosts, "STREAM_TOLERANCE", 0.9)  # other tests run at the same time
    path = tmp_path / "bench.json"
    rows = run(request("2+1", gbps="4"), 2, path)  # at 1 Gb/s, half of the time would be waiting
    assert json.loads(path.read_text())["rows"] == rows
    assert [(row["comm_dtype"], row["ranks_per_host"], row["algorithm"]) for row in rows] == [
        ("same", "2+1", "hierarchical"),
        ("bf16", "2+1", "hierarchical"),
    ]
    size = 4 * sum(gradient_sizes("resnet18"))
    for row, share in zip(rows, (1, 0.5), strict=True):
        assert row["model"] == "resnet18" and row["hosts"] == 2 and row["gbps"] == 4.0 and row["rounds"] == 2
        assert row["bytes_planned"] == pytest.approx(2 * share * size, rel=1e-3)
        assert row["bytes_counted"] == pytest.approx(row["bytes_planned"], rel=0.05)
        assert row["wire_limit_s"] == pytest.approx(2e-9 * share * size, rel=1e-3)
        assert row["ours_s"] > 0 and row["ddp_ratio"] > 0 and row["per_tensor_ratio"] > 0
    assert not names_of(os.getpid())


@pytest.mark.usefixtures("namespaces")
def test_failed_rank_is_reported_and_its_host_is_removed(capfd: pytest.CaptureFixture[str]) -> None:
    broken = Task(request("1"), {}, 1.0, 1.0, (1, 1), 9)
    with (
        pytest.raises(RankFailed, match="KeyError: 'resnet18'") as failed,
        hosts(2, 1.0) as made,
    ):
        run_ranks(made, (1, 1), "megabatch_lab.bench.cluster", msgspec.json.encode(broken))
    assert "Traceback" in failed.value.trace and failed.value.exit_code == 1
    assert capfd.readouterr() == ("", "")
    assert not names_of(os.getpid())


@pytest.mark.usefixtures("namespaces")
def test_ctrl_c_leaves_no_namespace_process_or_file(tmp_path: Path) -> None:
    words = ["bench", "cluster", "--ranks-per-host", "1", "--gbps", "0.05", "--rounds", "9999", "--model", "small_cnn"]
    # A separate TMPDIR shows files that remain.
    bench = subprocess.Popen(
        [sys.executable, "-m", "megabatch", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert bench.stderr
    deadline_s, at_start, sent = time.monotonic() + 90, 0, 0
    while sent < at_start + 3_000_000 and time.monotonic() < deadline_s:  # enough to be inside the all-reduces
        assert bench.poll() is None, bench.stderr.read()
        inside = processes_in(names_of(bench.pid))
        if len(inside) >= 4:  # two launchers and two ranks
            sent = bytes_sent(next(name for name in names_of(bench.pid) if name.endswith("-h0")))
            at_start = at_start or sent
        time.sleep(0.05)
    bench.send_signal(signal.SIGINT)
    assert bench.wait(timeout=30) == 130
    assert bench.stderr.read() == ""
    assert at_start and not names_of(bench.pid)
    assert not [process for process in inside if is_running(process)]
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_processes_and_namespaces(number: signal.Signals) -> None:
    program = """
import subprocess, time
from megabatch_lab.bench.hosts import hosts
with hosts(2, 1.0) as cluster:
    print(cluster.hosts[1].start(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup ignores SIGHUP
    )
    assert process.stdout
    inside = int(process.stdout.readline())
    assert len(names_of(process.pid)) == 3 and is_running(inside)
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert not names_of(process.pid) and not is_running(inside)


@pytest.mark.usefixtures("namespaces")
def test_sweep_removes_only_namespaces_of_dead_processes() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    owners = {f"mb{gone.pid}-1-h0": False, f"mb{os.getpid()}-1-h0": False}  # the second pid was reused
    owners[f"mb{os.getppid()}-{started_at(os.getppid())}-h0"] = True
    left = []
    try:
        for name in owners:
            subprocess.run(["ip", "netns", "add", name], check=True)
            left.append(Host(name, "").start(["sleep", "600"]))
        sweep()
        assert {name: (NAMESPACES / name).exists() for name in owners} == owners
        assert [process.poll() is None for process in left] == list(owners.values())
    finally:
        for process in left:
            process.kill()
            process.wait()
        for name in owners:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
