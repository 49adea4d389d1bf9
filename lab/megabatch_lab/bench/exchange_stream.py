"""Measure the bandwidth of hosts that exchange messages like Gloo, over plain TCP, without ranks, torch or reductions.

Gloo sends a message after its receiver has sent a ready message on the same connection, behind other data.  An
all-reduce in stages (comm/cpu/process_group.py) is two exchanges on separate connections:
    scatter   every host sends a message to every other host; the next scatter starts before this one has ended
    gather    messages travel around a ring, each forwarded on arrival; the next gather starts after this one has ended
Run on every host: exchange_stream.py HOST MESSAGE_BYTES SECONDS ADDRESS...; prints the Gb/s that this host received.
"""

import os
import queue
import socket
import sys
import threading
import time

SCATTER_PORT, GATHER_PORT = 5600, 5601
WARM_UP_S, LATEST_S = 0.4, 1.0  # keep sending: the other hosts may still be measuring
READY, MESSAGE = b"R", b"M"
CONNECT_ATTEMPTS, CONNECT_PAUSE_S = 300, 0.02


class Connection:
    def __init__(self, link: socket.socket, num_bytes: int) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link, self.message = link, bytes(num_bytes)
        self.to_send: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.arrived = threading.Semaphore(0)
        for loop in (self.send, self.receive):
            threading.Thread(target=loop, daemon=True).start()

    def send(self) -> None:
        while True:
            self.link.sendall(self.to_send.get())

    def receive(self) -> None:
        kind, room = bytearray(1), memoryview(bytearray(len(self.message)))
        while self.link.recv_into(kind):
            if kind == READY:
                self.to_send.put(MESSAGE + self.message)
            else:
                self.link.recv_into(room, len(room), socket.MSG_WAITALL)
                self.arrived.release()

    def ask(self) -> None:
        self.to_send.put(READY)


def connect(host: int, addresses: list[str], port: int, num_bytes: int) -> dict[int, Connection]:
    """Connect to every other host."""
    with socket.create_server((addresses[host], port)) as server:
        found: dict[int, socket.socket] = {}
        for other in range(host):
            found[other] = connect_to(addresses[other], port)
            found[other].sendall(bytes([host]))
        while len(found) < len(addresses) - 1:
            link = server.accept()[0]
            found[link.recv(1)[0]] = link
    return {other: Connection(link, num_bytes) for other, link in found.items()}


def connect_to(address: str, port: int) -> socket.socket:
    for _ in range(CONNECT_ATTEMPTS):
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:  # the other host is not listening yet
            time.sleep(CONNECT_PAUSE_S)
    raise TimeoutError(f"{address}:{port} is not listening")


class Exchange:
    def __init__(self, host: int, addresses: list[str], num_bytes: int) -> None:
        self.scatters = connect(host, addresses, SCATTER_PORT, num_bytes)
        self.before = connect(host, addresses, GATHER_PORT, num_bytes)[(host - 1) % len(addresses)]
        self.num_turns = 0
        self.gather_begins, self.gather_ended = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self.gather, daemon=True).start()
        self.begin_scatter()

    def begin_scatter(self) -> None:
        for connection in self.scatters.values():
            connection.ask()

    def gather(self) -> None:
        while self.gather_begins.acquire():
            for _ in self.scatters:
                self.before.ask()
                self.before.arrived.acquire()
            self.gather_ended.release()

    def turn(self) -> None:
        """Complete one scatter and start one gather."""
        self.begin_scatter()
        if self.num_turns:
            self.gather_ended.acquire()
        for connection in self.scatters.values():
            connection.arrived.acquire()
        self.gather_begins.release()
        self.num_turns += 1

    def turns_per_s(self, seconds: float) -> float:
        """Return turns per second."""
        began_s, num_before = time.perf_counter(), self.num_turns
        while (elapsed_s := time.perf_counter() - began_s) < seconds:
            self.turn()
        return (self.num_turns - num_before) / elapsed_s


def main(host: int, num_bytes: int, seconds: float, addresses: list[str]) -> None:
    exchange = Exchange(host, addresses, num_bytes)
    exchange.turns_per_s(WARM_UP_S)
    received = 2 * (len(addresses) - 1) * num_bytes * exchange.turns_per_s(seconds)
    print(8e-9 * received, flush=True)
    threading.Timer(LATEST_S, os._exit, (0,)).start()
    while True:
        exchange.turn()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
