"""Video read by PyAV, each frame with its arrival time.

Guarantees: a video whose frames have more than ``max_pixels`` is not decoded. Broken frames and cut JPEG files are
dropped. A camera's JPEG is passed on unchanged, never encoded again.
One thread decodes: with n threads FFmpeg returns each frame n frames late.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from av.error import FFmpegError, InvalidDataError

from agent.sources.cameras.pictures.presentation import PresentationClock
from agent.sources.cameras.pictures.size import check_size, decoded_jpeg
from agent.sources.cameras.pictures.source import Snapshot
from experts.image_files.jpeg import START, picture_end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from av.packet import Packet
    from av.video.frame import VideoFrame

    from agent.sources.cameras.pictures.source import Picture

COUNTED = {"mpjpeg", "mjpeg"}  # formats without times: FFmpeg numbers the frames instead
PARSED = {"h264", "hevc"}  # codecs whose packets over RTSP end at the start of the next packet
JPEG_TABLES = b"\xff\xc4"


class Capture:
    """Opened video. Raises FFmpegError where it cannot be opened, and as ``av.open``; CameraFailed for frames that are
    too large, now or later."""

    def __init__(
        self, place: str, options: Mapping[str, str], timeouts_s: tuple[float, float] | None, max_pixels: int,
        kind: str | None = None,
    ) -> None:  # fmt: skip
        self._container = av.open(place, format=kind, options=dict(options), timeout=timeouts_s)
        known = [stream for stream in self._container.streams.video if stream.codec_context is not None]
        if not known:
            raise InvalidDataError(0, "it holds no video of a codec that is known here")
        self._stream = known[0]
        self._max_pixels = max_pixels
        self._check_size()
        self._stream.codec_context.thread_count = 1
        self._stream.codec_context.options = {"max_pixels": str(max_pixels)}  # for frames that grow later
        codec = self._stream.codec_context.name
        self._is_jpeg = codec == "mjpeg"
        self._has_times = self._container.format.name not in COUNTED
        self._clock = PresentationClock(is_one_behind=codec in PARSED)
        self._packets = self._container.demux(self._stream)
        self._snapshots: deque[Snapshot] = deque()

    @property
    def frames_per_s(self) -> float:
        """Rate stated by the video; 0 without one."""
        return float(self._stream.average_rate or self._stream.guessed_rate or 0)

    def read(self, deadline: float) -> Snapshot | None:
        """Next whole picture; None if none arrived by the deadline. Raises EOFError at the end."""
        while not self._snapshots:
            self._clock.ask()
            try:
                packet = next(self._packets, None)
            except FFmpegError as error:
                raise EOFError(error.strerror) from error
            if packet is None:
                raise EOFError("it ended")
            self._clock.came(self._time(packet))
            self._snapshots.extend(self._decoded(packet))
            if time.monotonic() >= deadline:
                break
        return self._snapshots.popleft() if self._snapshots else None

    def close(self) -> None:
        self._container.close()

    def _time(self, of: Packet[Any] | VideoFrame) -> float | None:
        if not self._has_times or of.pts is None or of.time_base is None:
            return None
        return float(of.pts * of.time_base)

    def _decoded(self, packet: Packet[Any]) -> list[Snapshot]:
        """Frames that the packet completes: none for a broken packet, all remaining for the last."""
        if self._is_jpeg:
            jpeg = whole_jpeg(bytes(packet), self._max_pixels)
            return [] if jpeg is None else [self._snapshot(jpeg, packet)]
        try:
            frames = packet.decode()
        except InvalidDataError:
            self._check_size()  # they may have grown
            return []
        return [self._snapshot(frame, frame) for frame in frames if not frame.is_corrupt]

    def _check_size(self) -> None:
        check_size(self._stream.codec_context.height, self._stream.codec_context.width, self._max_pixels)

    def _snapshot(self, picture: Picture, timed: Packet[Any] | VideoFrame) -> Snapshot:
        return Snapshot(picture, self._clock.came_at(self._time(timed), time.monotonic()))


def whole_jpeg(packet: bytes, max_pixels: int) -> Picture | None:
    """Frame of motion JPEG: the file itself, or its pixels, BGR, if the file lacks its tables; None for a cut file.
    Raises CameraFailed for more than ``max_pixels``."""
    if not packet.startswith(START) or (end := picture_end(packet)) is None:
        return None
    if JPEG_TABLES in packet:
        return packet[:end]
    pixels = decoded_jpeg(packet, max_pixels)
    return None if pixels is None else np.ascontiguousarray(pixels[:, :, ::-1])
