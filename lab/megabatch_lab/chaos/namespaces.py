"""Hosts on one machine: network namespaces, each with a network card of its own, around a switch.

    host i   namespace, lo, and eth0 with the address 10.77.0.(i+1), MTU 1500
    switch   one more namespace, in which a bridge joins the other ends of the hosts' cables (veth pairs)

The machine's own network is never touched.  Where a rate is given, both ends of a cable send through a token bucket
(`tc tbf`) at it, so every port has that much each way; frames of 1514 bytes carry 1448, so a stream of TCP gets 95.6 %
of it.  Congestion control is the machine's own.  Ranks in different hosts have no memory in common
(`megabatch.ranks.machine.host_identity`), though /dev/shm, files and cores are the same.

Names tell whose they are: mb<process id>-<when it started>-h0.  What was left by one killed with -9 (namespaces, and
processes in them) goes when the next one starts.
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
BURST_S, MIN_BURST_BYTES = 1e-3, 128 << 10  # a segment of 64 KiB that TCP hands down must fit, or headers multiply
QUEUE_S = 8e-3  # what does not get out so soon is dropped
KILL_TIMEOUT_S = 10.0


class Host(NamedTuple):
    name: str  # of the namespace
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Runs `words` in this host, in the same process."""
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, command: Sequence[str], **options: object) -> "subprocess.Popen[str]":
        """In a session of its own: Ctrl-C is for us alone.  When this returns it is inside, where it is found."""
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
        except OSError:  # it has ended
            return False

    def plug(self, is_in: bool) -> None:
        """Pulls the cable out of the switch, or puts it back: the host keeps its address."""
        prefix, _, place = self.name.rpartition("-h")
        call("ip", "-n", f"{prefix}-switch", "link", "set", f"port{place}", "up" if is_in else "down")


def require_tools() -> None:
    """Before anything is started."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing or os.geteuid() != 0:
        lacking = " and ".join([*(["root"] if os.geteuid() else []), *missing])
        raise UserError(f"hosts are network namespaces, which needs {lacking}; run it as root, with iproute2 installed")


@contextmanager
def namespaces(num_hosts: int, gbps: float | None = None) -> Iterator[list[Host]]:
    """Everything is removed at the end, processes first, also after errors, Ctrl-C and SIGTERM."""
    require_tools()
    sweep()
    prefix = f"mb{os.getpid()}-{started_at(os.getpid())}"
    switch = f"{prefix}-switch"
    hosts = [Host(f"{prefix}-h{i}", f"10.77.0.{i + 1}") for i in range(num_hosts)]
    names = [switch, *(host.name for host in hosts)]
    with stop_signals() as ignore_signals, ExitStack() as stack:
        for name in names:
            stack.callback(remove, name)
        stack.callback(ignore_signals)  # first of all: what is being removed is removed to the end
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
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise UserError(f"`{' '.join(command)}` fails ({said}); it needs a kernel with namespaces, veth, tbf")
    return done.stdout


def sweep() -> None:
    """Removes the namespaces of processes that are no more."""
    for path in NAMESPACES.glob("mb*") if NAMESPACES.is_dir() else ():
        owner = NAME.fullmatch(path.name)
        if owner and started_at(int(owner[1])) != int(owner[2]):
            remove(path.name)


def started_at(process: int) -> int | None:
    """In ticks since the machine was started; with it, a process id is never used twice.  None: it is no more."""
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def remove(name: str) -> None:
    if (NAMESPACES / name).exists():
        end_processes(name)
        call("ip", "netns", "delete", name)


def end_processes(name: str) -> None:
    """All that run in this namespace, torchrun's ranks too, which live in sessions of their own."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while (processes := call("ip", "netns", "pids", name).split()) and time.monotonic() < deadline_s:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        time.sleep(0.01)


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Ctrl-C, SIGTERM and SIGHUP end what is inside like an error.  Yields what makes them be ignored to the end."""
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def ignore() -> None:
        for number in known:
            signal.signal(number, signal.SIG_IGN)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore()
        sys.exit(128 + number)

    try:
        for number, action in known.items():
            if action is not signal.SIG_IGN:  # as nohup asks
                signal.signal(number, stop)
        yield ignore
    finally:
        for number, action in known.items():
            signal.signal(number, action)
