"""What a process knows of its machine: its host, its cores, its memory."""

import contextlib
import errno
import ipaddress
import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def host_identity() -> str:
    """Ranks with the same share a memory, and see each other's processes.

    Test hosts on one machine differ in their network namespace only, containers of one rank each in that of processes.
    """
    links = [Path("/proc/self/ns/net"), Path("/proc/self/ns/pid")]
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = [boot.read_text().strip(), *(str(link.readlink()) for link in links)] if boot.exists() else []
    return " ".join([platform.node(), *known])


def is_stopped(process: int) -> bool:
    """By a signal such as SIGSTOP; one that a debugger holds is in good hands."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or the system does not say
        return False


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def fair_threads(rank: int, cores: Sequence[tuple[str, frozenset[int]]]) -> int:
    """This rank's share of the cores, given every rank's host and usable cores.

    srun gives each of its tasks cores of its own, torchrun lets all ranks of a host share all of them.
    """
    host, mine = cores[rank]
    here = [theirs for other, theirs in cores if other == host]
    share = sum(1 / sum(core in theirs for theirs in here) for core in mine)
    return max(1, int(share + 1e-6))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def resident_mb() -> float | None:
    """What this process has in memory; None where the system does not say."""
    try:
        _, pages, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


# Where ranks listen, and how they notice that a host is lost.
#
# Whoever reaches a port of the store, of Gloo or of NCCL can disturb the run, and take part in it: nothing there asks
# who it is.  So nothing listens on more than it needs: the loopback interface, where all ranks are on this host.

LOOPBACK, LOOPBACK_NAME = "127.0.0.1", "lo"  # Linux calls it that
EVERYWHERE = ""
LOST_AFTER_S = 10
IDLE_S, EVERY_S = 4, 2
PROBES = (LOST_AFTER_S - IDLE_S) // EVERY_S


@contextlib.contextmanager
def on_loopback(is_alone: bool) -> Iterator[None]:
    """Inside, groups of Gloo and NCCL listen on the loopback interface, if all ranks are on this host.

    Gloo would take the address of the host's name, and has no need of what a cluster's set-up has named; NCCL's
    interface is left to whoever has set one, since it may choose more than where it listens.
    """
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} if is_alone and sys.platform == "linux" else set[str]()
    before = {name: os.environ.get(name) for name in names}
    for name in names:
        if name == "GLOO_SOCKET_IFNAME" or not before[name]:
            os.environ[name] = LOOPBACK_NAME
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def listening_on(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        # The name of rank 0's host may lead to it without being an address of it: a service of Kubernetes does.
        if error.errno != errno.EADDRNOTAVAIL or address == EVERYWHERE:
            raise
        return listening_on(EVERYWHERE, port)


def address_of(host: str) -> str:
    """Where rank 0 listens for ranks of other hosts, who know its host by this name.

    Its own name may be an address of the loopback interface to itself alone (Debian's 127.0.1.1): then everywhere.
    """
    try:
        found = [str(place[4][0]) for place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:  # others may know it
        return EVERYWHERE
    address = next((each for each in found if ":" not in each), found[0])
    return EVERYWHERE if is_loopback(address) else address


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def notice_lost_hosts() -> int:
    """Every connection of this process to another host breaks when that does not answer for LOST_AFTER_S; how many.

    The kernel asks and answers, also for a process that computes or is stopped.  Those of Gloo, NCCL and the store are
    meant, which have no option for it.
    """
    found = 0
    folder = Path("/proc/self/fd")  # Linux has it, and the options below
    for path in [*folder.iterdir()] if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile, or is no connection
            if not path.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                if leads_elsewhere(connection):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_AFTER_S)
                    found += 1
    return found


def leads_elsewhere(connection: socket.socket) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    return not is_loopback(connection.getpeername()[0])
