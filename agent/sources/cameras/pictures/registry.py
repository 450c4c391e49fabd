"""Registry of picture sources, by the scheme of a camera's address: a source is imported on its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.faults.errors import CameraFailed

if TYPE_CHECKING:
    from agent.sources.cameras.pictures.source import CameraConnection, PictureSource


def source_of(connection: CameraConnection) -> PictureSource:
    """Source for a connection's scheme, not opened yet. Raises CameraFailed for an unknown scheme."""
    match connection.scheme:
        case "file":
            from agent.sources.cameras.pictures.clip import ClipSource

            return ClipSource(connection)
        case "http" | "https" | "rtsp" | "rtsps" | "v4l2":
            from agent.sources.cameras.pictures.stream import StreamSource

            return StreamSource(connection)
        case "genicam":
            from agent.sources.cameras.pictures.genicam import GenicamSource

            return GenicamSource(connection)
    raise CameraFailed(f"nothing reads from {connection.scheme}:", is_final=True)
