"""Messages and frames between an agent and a camera's process."""

from __future__ import annotations

import os
import socket

import pytest

from agent.sources.cameras import wire


def test_a_frame_travels_beside_its_message_and_nobody_can_change_it():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    content = os.urandom(3_000_000)
    with ends[0], ends[1]:
        ours = wire.sealed(content)
        wire.send(ends[0], wire.Taken(1, 0.5), (ours,))
        os.close(ours)
        received = wire.receive(ends[1])
    assert received is not None
    message, (theirs,) = received
    assert message == wire.Taken(1, 0.5)
    for change in (lambda: os.pwrite(theirs, b"torn", 0), lambda: os.ftruncate(theirs, 2)):
        with pytest.raises(PermissionError):
            change()
    assert wire.unsealed(theirs) == content
