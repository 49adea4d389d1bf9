"""Listening sockets, as the kernel lists them."""

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # tcp: listening; udp: bound but not connected


class Listener(NamedTuple):
    kind: str
    address: str
    port: int

    @property
    def is_private(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def list_namespace_listeners(process: int) -> set[Listener]:
    """Return the listeners in the network namespace of a process."""
    return {listener for listener, _ in read_sockets(process)}


def list_process_listeners() -> set[Listener]:
    """Return the listeners of this process only."""
    inodes = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # iterdir's descriptor is closed by now
            inodes |= {*re.findall(r"^socket:\[(\d+)\]$", str(path.readlink()))}
    return {listener for listener, inode in read_sockets(os.getpid()) if inode in inodes}


def read_sockets(process: int) -> list[tuple[Listener, str]]:
    """Return each listener with its inode."""
    found = []
    for kind, state in STATES.items():
        path = Path(f"/proc/{process}/net/{kind}")
        for fields in (line.split() for line in path.read_text().splitlines()[1:]) if path.exists() else ():
            address, port = fields[1].split(":")
            if fields[3] == state:
                found.append((Listener(kind, to_address(address), int(port, 16)), fields[9]))
    return found


def to_address(digits: str) -> str:
    """Convert an address that the kernel prints as 32-bit words in little-endian order."""
    words = [bytes.fromhex(digits[begin : begin + 8])[::-1] for begin in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
