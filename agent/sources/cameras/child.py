"""Start of a camera's process, a child of the agent.

Guarantees: a failed import is reported to the agent.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from agent.faults.errors import CameraFailed
from agent.sources.cameras import wire
from agent.sources.cameras.pictures.source import CameraConnection
from experts.children.child import parent

if TYPE_CHECKING:
    from experts.children.messages import Channel

SWITCH_S = 0.0005  # short, to tell waits for the interpreter's lock from waits for the camera


def main() -> None:
    agent = parent()
    assert agent is not None, "a child"
    message = agent.receive()
    if message is None:
        return
    connection, _ = wire.decode(message)
    assert isinstance(connection, CameraConnection), "the first message"
    try:
        serve(agent, connection)
    except CameraFailed as error:
        agent.send(wire.encode(wire.Failed(error.reason, error.is_final)))


def serve(agent: Channel, connection: CameraConnection) -> None:
    """Read the camera until either end closes. Raises CameraFailed if the start fails."""
    try:
        import cv2

        from agent.sources.cameras.grabber import Grabber
        from agent.sources.cameras.pictures.registry import source_of

        source = source_of(connection)
    except ImportError as error:
        raise CameraFailed(f"a library is not there ({error}) - install coserve again", is_final=True) from error
    cv2.setNumThreads(1)  # the cores are for the experts
    sys.setswitchinterval(SWITCH_S)
    agent.send(wire.encode(wire.Ready()))
    Grabber(agent, connection, source).run()


if __name__ == "__main__":
    main()
