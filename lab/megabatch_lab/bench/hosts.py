"""The hosts of a bench: the network namespaces of `chaos.namespaces`, and the bandwidth of plain TCP between them."""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megabatch.errors import UserError
from megabatch_lab.chaos.namespaces import Host, namespaces

STREAM_PORT, STREAM_S, STREAM_TOLERANCE, STREAM_ATTEMPTS = 5555, 0.5, 0.12, 5
EXCHANGE_SCRIPT, EXCHANGE_S = Path(__file__).with_name("exchange_stream.py"), 1.0

RECEIVE = f"""
import socket, sys, time
socket.setdefaulttimeout(10)
with socket.create_server((sys.argv[1], {STREAM_PORT})) as server:
    print("ready", flush=True)
    stream = server.accept()[0]
room = bytearray(1 << 20)
started_s = time.perf_counter()
while time.perf_counter() - started_s < 0.2:  # TCP slow start
    stream.recv_into(room)
num_bytes, started_s = 0, time.perf_counter()
while (elapsed_s := time.perf_counter() - started_s) < {STREAM_S}:
    num_bytes += stream.recv_into(room)
print(8e-9 * num_bytes / elapsed_s)
"""
SEND = f"""
import contextlib, socket, sys
with contextlib.suppress(OSError), socket.create_connection((sys.argv[1], {STREAM_PORT})) as stream:
    while True:
        stream.sendall(bytes(1 << 18))
"""


Ranks = tuple[int, ...]  # of each host


class Cluster(NamedTuple):
    hosts: list[Host]
    gbps: float

    def stream_gbps(self, sender: int = 0, receiver: int = 1) -> float:
        """Return the bandwidth of one plain TCP stream, which must be near the nominal rate."""
        found: list[float] = []
        for _ in range(STREAM_ATTEMPTS):  # other processes may briefly use the cores
            found.append(measure_stream(self.hosts[sender], self.hosts[receiver]))
            if abs(found[-1] / self.gbps - 1) <= STREAM_TOLERANCE:
                return found[-1]
        rates = ", ".join(f"{rate:.2f}" for rate in found)
        raise UserError(
            f"a plain TCP stream between hosts of {self.gbps:g} Gb/s reached {rates} Gb/s; it must be "
            f"within {STREAM_TOLERANCE:.0%}: stop other processes, or give a lower --gbps"
        )

    def exchange_gbps(self, part_bytes: int) -> float:
        """Return the mean bandwidth of hosts that exchange parts of this size in stages over plain TCP, like Gloo."""
        addresses = [host.address for host in self.hosts]
        words = [str(part_bytes // len(self.hosts)), str(EXCHANGE_S), *addresses]
        command = [sys.executable, "-I", str(EXCHANGE_SCRIPT)]
        started = [
            host.start([*command, str(place), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for place, host in enumerate(self.hosts)
        ]
        answers = [process.communicate()[0] for process in started]
        if not all(answers):
            raise UserError(
                f"hosts of {self.gbps:g} Gb/s failed to exchange over TCP; stop other processes and try again"
            )
        return statistics.fmean(map(float, answers))


def measure_stream(sender: Host, receiver: Host) -> float:
    python = [sys.executable, "-I", "-c"]
    receiving = receiver.start([*python, RECEIVE, receiver.address], stdout=subprocess.PIPE)
    assert receiving.stdout
    receiving.stdout.readline()
    sending = sender.start([*python, SEND, receiver.address])
    rate, _ = receiving.communicate()
    if receiving.returncode or sending.wait():
        raise UserError(f"the TCP stream from {sender.name} to {receiver.name} failed; see the error above")
    return float(rate)


@contextmanager
def hosts(num_hosts: int, gbps: float) -> Iterator[Cluster]:
    """Create hosts.  On exit, including after errors, Ctrl-C and SIGTERM, end their processes and remove them."""
    with namespaces(num_hosts, gbps) as made:
        yield Cluster(made, gbps)
