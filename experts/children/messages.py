"""Whole messages between processes: a JSON text with bytes behind it, over a connected socket. Nothing is pickled.

Guarantees: ``unpacked(packed(value, *contents)) == (value, contents)``. A message arrives whole or not at all. Bytes of
another version, or that are no message, are a ValueError.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from contextlib import suppress
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

VERSION = 1
HEADER = struct.Struct("<HI")  # version, bytes of the JSON text
SIZE = struct.Struct("<Q")  # of a message on a socket
MOST_BYTES = 2**63  # of a message: no bound
PIECE_BYTES = 1024 * 1024  # of one read: a false size takes no memory
SHORT_BYTES = 16 * 1024  # sent as one: a process that is killed has sent all of it, or nothing


def packed(value: object, *contents: bytes) -> bytes:
    text = json.dumps([value, [len(content) for content in contents]], separators=(",", ":")).encode()
    return b"".join((HEADER.pack(VERSION, len(text)), text, *contents))


def unpacked(message: bytes) -> tuple[Any, list[bytes]]:
    """Value of a message, and the bytes behind it. Raises ValueError."""
    try:
        version, size = HEADER.unpack_from(message)
        if version != VERSION:
            raise ValueError(f"a message of version {version}, not {VERSION}: install the same version everywhere")
        value, sizes = json.loads(message[HEADER.size : HEADER.size + size])
        ends = list(accumulate(sizes, initial=HEADER.size + size))
        if ends[-1] != len(message):
            raise ValueError(f"a message of {len(message)} bytes that says {ends[-1]}")
    except (struct.error, TypeError) as error:
        raise ValueError(f"no message: {error!r}") from error
    return value, [message[start:end] for start, end in pairwise(ends)]


class Channel:
    """One end of a connected socket. Any thread sends, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = Lock()

    def send(self, *messages: bytes) -> None:
        """Send messages. Raises OSError once the other end is gone."""
        with self._sending:
            for message in messages:
                size = SIZE.pack(len(message))
                for part in (size + message,) if len(message) < SHORT_BYTES else (size, message):
                    self._socket.sendall(part)

    def receive(self, most_bytes: int = MOST_BYTES) -> bytes | None:
        """Wait for the next message; None once the other end is gone, is silent too long or begins a larger one."""
        with suppress(OSError):
            size = self._exactly(SIZE.size)
            count = 0 if size is None else SIZE.unpack(size)[0]
            return None if size is None or count > most_bytes else self._exactly(count)
        return None

    def wait_at_most(self, silent_s: float) -> None:
        """Bound each later wait for the other end, also amid a message."""
        self._socket.settimeout(silent_s)

    def _exactly(self, count: int) -> bytes | None:
        pieces = []
        while count:
            piece = self._socket.recv(min(count, PIECE_BYTES))
            if not piece:
                return None
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def is_readable(self, timeout_s: float) -> bool:
        """True once a message or the end has come; False after the timeout."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def finish(self) -> None:
        """Send no more: the other end receives the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End both directions, from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
