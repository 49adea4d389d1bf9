"""Hosts on one machine: network namespaces, each with a network card, connected by a switch.

    host i   namespace, lo, and eth0 with the address 10.77.0.(i+1), MTU 1500
    switch   another namespace, in which a bridge joins the other ends of the hosts' cables (veth pairs)

The machine's network is never changed.  With a rate, both ends of a cable send through a token bucket (`tc tbf`), so
every port has that rate in each direction.  Frames of 1514 bytes carry 1448, so a TCP stream reaches 95.6 % of it.
Congestion control is that of the machine.  Ranks on different hosts share no memory
(`megabatch.ranks.machine.host_identity`), although /dev/shm, files and cores are the same.

Names identify their owner: mb<process id>-<start time>-h0.  If the owner was killed with -9, the next start removes its
namespaces and the processes in them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from megabatch.errors import UserError

NAMESPACES = Path("/run/netns")
NAME = re.compile(r"mb(\d+)-(\d+)-(?:h\d|switch)")
BURST_S, MIN_BURST_BYTES = 1e-3, 128 << 10  # must fit a 64 KiB segment of TCP, or headers multiply
QUEUE_S = 8e-3  # packets that would wait longer are dropped
KILL_TIMEOUT_S = 10.0


class Host(NamedTuple):
    name: str  # of the namespace
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs `words` on this host in the same process."""
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, command: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        """Start a command in a new session, out of reach of Ctrl-C, and wait until it is inside the namespace."""
        words = self.command(command)
        process: subprocess.Popen[str] = subprocess.Popen(words, text=True, start_new_session=True, **options)  # type: ignore[call-overload]
        try:
            deadline_s = time.monotonic() + KILL_TIMEOUT_S
            while process.poll() is None and not self.holds(process.pid) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        except BaseException:
            process.kill()
            raise
        return process

    def holds(self, process: int) -> bool:
        try:
            return os.path.samestat(Path(f"/proc/{process}/ns/net").stat(), (NAMESPACES / self.name).stat())
        except OSError:  # the process has ended
            return False

    def plug(self, is_in: bool) -> None:
        """Plug the cable into the switch or unplug it.  The host keeps its address."""
        prefix, _, place = self.name.rpartition("-h")
        call("ip", "-n", f"{prefix}-switch", "link", "set", f"port{place}", "up" if is_in else "down")


def require_tools() -> None:
    """Raise UserError unless this is root with iproute2 installed."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        lacking = " and ".join([*(["root"] if os.geteuid() else []), *missing])
        raise UserError(f"creating hosts (network namespaces) needs {lacking}; run it as root, with iproute2 installed")


@contextmanager
def namespaces(num_hosts: int, gbps: float | None = None) -> Iterator[list[Host]]:
    """Create hosts.  On exit, including after errors, Ctrl-C and SIGTERM, end their processes and remove them."""
    require_tools()
    sweep()
    prefix = f"mb{os.getpid()}-{started_at(os.getpid())}"
    switch = f"{prefix}-switch"
    hosts = [Host(f"{prefix}-h{i}", f"10.77.0.{i + 1}") for i in range(num_hosts)]
    names = [switch, *(host.name for host in hosts)]
    with stop_signals() as ignore_signals, ExitStack() as stack:
        for name in names:
            stack.callback(remove, name)
        stack.callback(ignore_signals)  # runs first: signals must not interrupt the removal
        for name in names:
            call("ip", "netns", "add", name)
        call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        call("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, host in enumerate(hosts):
            call("ip", "-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "eth0", "netns", host.name)
            call("ip", "-n", switch, "link", "set", f"port{i}", "mtu", "1500", "master", "bridge", "up")
            call("ip", "-n", host.name, "link", "set", "lo", "up")
            call("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            call("ip", "-n", host.name, "link", "set", "eth0", "mtu", "1500", "up")
            if gbps is not None:
                shape(switch, f"port{i}", gbps)
                shape(host.name, "eth0", gbps)
        yield hosts


def shape(namespace: str, device: str, gbps: float) -> None:
    bytes_per_s = gbps * 1e9 / 8
    burst = max(MIN_BURST_BYTES, round(BURST_S * bytes_per_s))
    bucket = ["tbf", "rate", f"{round(8 * bytes_per_s)}bit", "burst", f"{burst}b", "latency", f"{1e3 * QUEUE_S:g}ms"]
    call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        error = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise UserError(f"`{' '.join(command)}` failed ({error}); use a kernel with namespaces, veth and tbf")
    return done.stdout


def sweep() -> None:
    """Remove the namespaces of processes that have ended."""
    for path in NAMESPACES.glob("mb*") if NAMESPACES.is_dir() else ():
        owner = NAME.fullmatch(path.name)
        if owner and started_at(int(owner[1])) != int(owner[2]):
            remove(path.name)


def started_at(process: int) -> int | None:
    """Return the start time in ticks since boot, which makes a process id unique, or None if the process has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def remove(name: str) -> None:
    if (NAMESPACES / name).exists():
        end_processes(name)
        call("ip", "netns", "delete", name)


def end_processes(name: str) -> None:
    """Kill all processes in this namespace, including torchrun's ranks, which run in separate sessions."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while (processes := call("ip", "netns", "pids", name).split()) and time.monotonic() < deadline_s:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.01)


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Make Ctrl-C, SIGTERM and SIGHUP raise SystemExit.  Yield a function that ignores them from then on."""
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def ignore() -> None:
        for number in known:
            signal.signal(number, signal.SIG_IGN)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore()
        sys.exit(128 + number)

    try:
        for number, action in known.items():
            if action is not signal.SIG_IGN:  # nohup
                signal.signal(number, stop)
        yield ignore
    finally:
        for number, action in known.items():
            signal.signal(number, action)
