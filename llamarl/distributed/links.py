"""Connections between processes that prove to each other that they know a secret. No torch."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge


def connect(place: str, secret: str, timeout_s: float) -> Connection:
    """To the process that listens at `host:port`. Raises OSError, EOFError or AuthenticationError."""
    host, port = place.rsplit(":", 1)
    connection = _bounded(socket.create_connection((host, int(port)), timeout_s), timeout_s)
    answer_challenge(connection, secret.encode())
    deliver_challenge(connection, secret.encode())
    return connection


def accept(accepted: socket.socket, secret: str, timeout_s: float) -> Connection:
    """The other end of `connect`. Raises OSError, EOFError or AuthenticationError."""
    connection = _bounded(accepted, timeout_s)
    deliver_challenge(connection, secret.encode())
    answer_challenge(connection, secret.encode())
    return connection


def _bounded(made: socket.socket, timeout_s: float) -> Connection:
    """Reads and writes that take longer fail with OSError."""
    made.settimeout(None)
    seconds, microseconds = divmod(int(timeout_s * 1e6), 1_000_000)
    limit = seconds.to_bytes(8, "little") + microseconds.to_bytes(8, "little")
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(made.detach())
