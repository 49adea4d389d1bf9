"""The machine of this process: its host, cores, memory and network interfaces."""

import array
import contextlib
import errno
import fcntl
import ipaddress
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def host_identity() -> str:
    """Return a string that is equal for ranks that share memory and see each other's processes.

    Simulated hosts on one machine differ only in the network namespace. Containers differ in the pid namespace.
    """
    links = [Path("/proc/self/ns/net"), Path("/proc/self/ns/pid")]
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = [boot.read_text().strip(), *(str(link.readlink()) for link in links)] if boot.exists() else []
    return " ".join([platform.node(), *known])


SPARE_DESCRIPTORS = 512


def allow_descriptors(count: int) -> None:
    """Raise the soft limit on open files to `count` plus a reserve, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def is_stopped(process: int) -> bool:
    """Return whether a signal such as SIGSTOP stopped the process. A process in a debugger does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or there is no /proc
        return False


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def bind_near_device(lists: Sequence[Path], index: int, tasks: Path = Path("/proc/self/task")) -> frozenset[int]:
    """Run this process on the cores that its device is attached to, and return them; empty if nothing was changed.

    Launching kernels and decoding into pinned memory are slower on the cores of another socket.  Nothing is changed if
    cores would be left over: on some virtual machines all devices claim to be at the first socket.  Of the cores that
    a launcher assigned, those near the device are used.

    Args:
        lists: Per device of this host, the file with its cores, /sys/bus/pci/devices/0000:07:00.0/local_cpulist.
        index: The device of this rank.
        tasks: The threads of this process.  New ones inherit the cores.
    """
    usable = usable_cores()
    try:
        near = [parse_cores(path.read_text()) & usable for path in lists]
        if near[index] in (frozenset(), usable) or frozenset().union(*near) != usable:
            return frozenset()
        for task in tasks.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(task.name), near[index])
    except (OSError, ValueError):  # no such list, or a container that forbids it
        return frozenset()
    return near[index]


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of cores of Linux, such as 0-15,32-47."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def fair_threads(rank: int, cores: Sequence[tuple[str, frozenset[int]]]) -> int:
    """Return this rank's share of the cores, given the host and usable cores of every rank.

    srun assigns separate cores to each task. With torchrun, the ranks of a host share all its cores.
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
    """Return the resident memory of this process; None if the system has no /proc."""
    try:
        _, pages, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


# Network interfaces that ranks listen on, and detection of lost hosts.
#
# The ports of the store, Gloo and NCCL have no authentication: any process that can connect can disturb the run or take
# part in it.  So ranks listen only on the interfaces that they need: the loopback interface if all are on this node.

LOOPBACK, LOOPBACK_NAME = "127.0.0.1", "lo"  # its name on Linux
ALL_INTERFACES = ""
LOST_AFTER_S = 10
IDLE_S, INTERVAL_S = 4, 2
PROBES = (LOST_AFTER_S - IDLE_S) // INTERVAL_S
SIOCGIFCONF, MAX_INTERFACES = 0x8912, 256  # netdevice(7)
IFREQ = struct.Struct("16s4x4s16x")  # an interface's name and IPv4 address, in Linux's struct ifreq on 64 bits


@contextlib.contextmanager
def on_interface(is_single_node: bool, gloo_default: str | None = None) -> Iterator[None]:
    """Make Gloo and NCCL listen on the loopback interface in this context, if all ranks are on this node.

    GLOO_SOCKET_IFNAME is overridden: a cluster's setting is not needed on one node. NCCL_SOCKET_IFNAME is kept if it is
    set: it may affect more than the listening address. Between hosts, `gloo_default` replaces Gloo's default, which is
    the address of the host name: that may not resolve, or resolve to a loopback address.
    """
    values = {"GLOO_SOCKET_IFNAME": LOOPBACK_NAME} if is_single_node else {}
    if is_single_node and not os.environ.get("NCCL_SOCKET_IFNAME"):
        values["NCCL_SOCKET_IFNAME"] = LOOPBACK_NAME
    if not is_single_node and gloo_default and not os.environ.get("GLOO_SOCKET_IFNAME"):
        values["GLOO_SOCKET_IFNAME"] = gloo_default
    values = values if sys.platform == "linux" else {}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def listen_on(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        # The name of rank 0's host may resolve to an address that forwards to it, such as that of a Kubernetes service.
        if error.errno != errno.EADDRNOTAVAIL or address == ALL_INTERFACES:
            raise
        return listen_on(ALL_INTERFACES, port)


def listen_address(host: str) -> str:
    """Return the address that rank 0 listens on for ranks of other hosts, which connect to `host`.

    On its own machine the name may resolve to a loopback address (Debian's 127.0.1.1): then use all interfaces.
    """
    try:
        address = resolve(host)
    except OSError:  # other hosts may resolve it
        return ALL_INTERFACES
    return ALL_INTERFACES if is_loopback(address) else address


def resolve(host: str) -> str:
    """Return an address of the host, IPv4 if it has one. Raise OSError if the name is not known."""
    found = [str(place[4][0]) for place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return next((each for each in found if ":" not in each), found[0])


def address_towards(address: str) -> str | None:
    """Return the address from which this host sends to `address`; None if it has no route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address; None if there is none, or outside Linux."""
    if sys.platform != "linux":
        return None
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        table = Path("/proc/net/if_inet6")  # address, index, prefix length, scope, flags, name
        rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
        return next((row[5] for row in rows if row[0] == packed), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        buffer = array.array("B", bytes(MAX_INTERFACES * IFREQ.size))
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        num_bytes, _ = struct.unpack("iP", fcntl.ioctl(any_socket, SIOCGIFCONF, request))
    found = IFREQ.iter_unpack(buffer.tobytes()[:num_bytes])
    names = {socket.inet_ntoa(each): name.partition(b"\0")[0].decode() for name, each in found}
    return names.get(address, "").partition(":")[0] or None  # eth0:1 is an alias of eth0


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def enable_keepalive() -> int:
    """Make every connection to another host fail if that does not answer for LOST_AFTER_S; return their number.

    The kernels exchange the probes, even if a process is busy or stopped. Gloo, NCCL and the store have no option for
    this, so it is set on all open sockets.
    """
    found = 0
    folder = Path("/proc/self/fd")  # only Linux has it and the options below
    for path in [*folder.iterdir()] if folder.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):  # closed in the meantime, or not a connection
            if not path.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                if is_remote(connection):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_AFTER_S)
                    found += 1
    return found


def is_remote(connection: socket.socket) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    return not is_loopback(connection.getpeername()[0])
