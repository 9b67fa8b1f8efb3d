"""Signs of life between nodes: MPI does not notice that a node has lost its power or its cable, and waits for it.

The nodes form a ring. Every few seconds each rank sends a datagram to the ranks of the next node, and counts for how
long none has come from the node before it. A node from which none ever came is not missed: a firewall may block them.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

PERIOD = 5.0  # seconds between datagrams
SILENT = 24  # periods without one, after which a node is missed
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


class Peer(NamedTuple):
    """Where a rank can be reached; ``node`` is the lowest rank of its node."""

    node: int
    host: str
    addresses: list[str]
    port: int


class Heartbeat:
    """Sends this rank's datagrams, and listens for those of the node before, in a thread that ``start`` starts."""

    def __init__(self, node: int) -> None:
        """``node``: the lowest rank of this rank's node."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.own = Peer(node, socket.gethostname(), _addresses(), self._socket.getsockname()[1])
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, peers: Sequence[Peer], run: str, missed: Callable[[str, float], object]) -> None:
        """``peers``: all ranks; ``run``: a name that only the ranks of this run know.

        Once the node before this one has been silent for ``SILENT`` periods, ``missed(host, seconds)`` is called every
        period for as long as that lasts.
        """
        nodes = sorted({peer.node for peer in peers})
        here = nodes.index(self.own.node)
        after, before = nodes[(here + 1) % len(nodes)], nodes[here - 1]
        targets = [(address, peer.port) for peer in peers if peer.node == after for address in peer.addresses]
        host = next(peer.host for peer in peers if peer.node == before)

        def beat() -> None:
            message, expected = f"{run} {self.own.node}".encode(), f"{run} {before}".encode()
            heard, silent = False, 0
            while not self._closed.is_set():
                for target in targets:
                    with suppress(OSError):  # a network that is down for a while
                        self._socket.sendto(message, target)
                # Periods are counted instead of reading a clock, which runs on while the whole job is suspended.
                came = self._listen(expected)
                heard, silent = heard or came, 0 if came else silent + 1
                if heard and silent >= SILENT:
                    missed(host, silent * PERIOD)

        self._thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _listen(self, expected: bytes) -> bool:
        """Listen for one period; returns whether the message came."""
        came, end = False, time.monotonic() + PERIOD
        while not self._closed.is_set() and (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with suppress(OSError):
                came = self._socket.recv(256) == expected or came
        return came

    def close(self) -> None:
        self._closed.set()
        if self._thread:
            with suppress(OSError):  # wakes up the thread
                self._socket.sendto(b"", ("127.0.0.1", self.own.port))
            self._thread.join()
        self._socket.close()


def _addresses() -> list[str]:
    """This node's IPv4 addresses, without the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(query, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]
