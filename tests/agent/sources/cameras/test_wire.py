"""Messages and frames between an agent and a camera's process."""

from __future__ import annotations

import os
import socket

import pytest

from agent.sources.cameras import wire
from agent.sources.cameras.pictures.source import CameraConnection


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize(
    "message",
    [
        CameraConnection("rtsp://host/x", 1.0, 2.0, 3, user="ü", password='"', frames_per_s=4.0),
        wire.Take(7, since=1.5),
        wire.Ready(),
        wire.Opened(),
        wire.Seen(3, 1),
        wire.Failed("why\nnot", is_final=True),
    ],
)
def test_a_message_arrives_as_it_was_sent(ends: tuple[socket.socket, socket.socket], message: wire.Message) -> None:
    with ends[0], ends[1]:
        wire.send(ends[0], message)
        wire.send(ends[0], wire.Ready())
        assert wire.receive(ends[1]) == (message, ())
        assert wire.receive(ends[1]) == (wire.Ready(), ())
        ends[0].close()
        assert wire.receive(ends[1]) is None


def test_a_frame_travels_beside_its_message_and_nobody_can_change_it(ends: tuple[socket.socket, socket.socket]) -> None:
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
