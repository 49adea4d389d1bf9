"""Sockets that wait for whoever comes, as the kernel lists them."""

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STATES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # listening; bound, and connected to nobody


class Listener(NamedTuple):
    kind: str
    address: str
    port: int

    @property
    def is_private(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listeners_beside(process: int) -> set[Listener]:
    """All in the network namespace of a process."""
    return {listener for listener, _ in listed(process)}


def own_listeners() -> set[Listener]:
    """Those of this process alone."""
    inodes = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which they are listed
            inodes |= {*re.findall(r"^socket:\[(\d+)\]$", str(path.readlink()))}
    return {listener for listener, inode in listed(os.getpid()) if inode in inodes}


def listed(process: int) -> list[tuple[Listener, str]]:
    found = []
    for kind, state in STATES.items():
        path = Path(f"/proc/{process}/net/{kind}")
        for fields in (line.split() for line in path.read_text().splitlines()[1:]) if path.exists() else ():
            address, port = fields[1].split(":")
            if fields[3] == state:
                found.append((Listener(kind, to_address(address), int(port, 16)), fields[9]))
    return found


def to_address(digits: str) -> str:
    """The kernel prints words of 32 bits, as this machine reads them."""
    words = [bytes.fromhex(digits[begin : begin + 8])[::-1] for begin in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
