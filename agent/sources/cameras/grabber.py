"""Loop of a camera's process: reads pictures continuously, and sends the frames that the agent requests.

Guarantees: requests are answered in order, each with a separate, recent enough frame. Frames without a request are
counted, and neither encoded nor kept. The last message has the reason of the end. No message contains the password.
Structure: one thread reads the source, one encodes, the main thread listens.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import cv2
import numpy as np

from agent.faults.errors import CameraFailed
from agent.sources.cameras import wire
from agent.sources.cameras.pictures.size import check_size, decoded_jpeg
from agent.sources.cameras.pictures.source import DeepPixels
from experts.image_files.depth import deep_png

if TYPE_CHECKING:
    from collections.abc import Callable

    from av.video.frame import VideoFrame
    from numpy.typing import NDArray

    from agent.sources.cameras.pictures.source import CameraConnection, Picture, PictureSource, Snapshot
    from experts.children.messages import Channel

OPENING_SHARE = 0.9  # of the agent's timeout: this process reports the reason before the agent gives up
READ_S = 0.25  # deadline of one read
SAY_SEEN_S = 0.1  # between two counts
CHECK_S = 1.0  # between two test decodings of JPEG, while they succeed
CLOSE_S = 0.4  # for the source to close
LAST_FRAMES_S = 5.0  # for requested frames to be encoded, before the last message


class Grabber:
    def __init__(self, agent: Channel, connection: CameraConnection, source: PictureSource) -> None:
        self._agent = agent
        self._connection = connection
        self._source = source
        self._guard = threading.Lock()  # guards the six fields below
        self._asked: deque[wire.Take] = deque()
        self._latest: Snapshot | None = None  # not sent yet
        self._unsent = 0  # frames for requests, not sent yet
        self._frames = 0
        self._broken = 0
        self._lag_s = 0.0
        self._shots: queue.SimpleQueue[tuple[wire.Take, Snapshot]] = queue.SimpleQueue()
        self._checked_at = float("-inf")
        self._counted_at = float("-inf")
        self._stopping = threading.Event()

    def run(self) -> None:
        """Run until the agent disconnects or the source fails; ends the process."""
        reading = threading.Thread(target=self._read, name="reader", daemon=True)
        threading.Thread(target=self._encode, name="encoder", daemon=True).start()
        reading.start()
        while (received := self._agent.receive()) is not None:
            take, _ = wire.decode(received)
            if isinstance(take, wire.Take):
                with self._guard:
                    self._asked.append(take)
                    self._answer()
        self._stopping.set()
        reading.join(CLOSE_S)
        os._exit(0)

    def _answer(self) -> None:
        """Answer the first request with the latest picture, if the picture is young enough."""
        if self._latest is None or not self._asked:
            return
        since = self._asked[0].since
        if since is None or self._latest.came_at >= since:
            self._unsent += 1
            self._shots.put((self._asked.popleft(), self._latest))
            self._latest = None

    # -- on the reader's thread --

    def _read(self) -> None:
        failure = CameraFailed("the agent ended it")
        try:
            self._source.open(time.monotonic() + OPENING_SHARE * self._connection.open_timeout_s)
            self._say(wire.Opened())
            while not self._stopping.is_set():
                snapshot = self._source.read(time.monotonic() + READ_S)
                if snapshot is not None and self._is_sound(snapshot.picture):
                    self._came(snapshot)
                self._count()
        except CameraFailed as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: a source's library raises what it likes
            failure = CameraFailed(f"{type(error).__name__}: {error}")
        self._end(failure)

    def _is_sound(self, picture: Picture) -> bool:
        """Test decoding, now and then: a camera that sends only invalid frames does not count as streaming."""
        now = time.monotonic()
        if now < self._checked_at + CHECK_S:
            return True
        max_pixels, is_sound = self._connection.max_pixels, True
        if isinstance(picture, bytes):
            is_sound = encode(picture, max_pixels) is not None
        else:
            _check_size(picture, max_pixels)
        self._checked_at = now if is_sound else float("-inf")
        with self._guard:
            self._broken += not is_sound
        return is_sound

    def _came(self, snapshot: Snapshot) -> None:
        with self._guard:
            self._frames += 1
            self._lag_s = time.monotonic() - snapshot.came_at
            self._latest = snapshot
            self._answer()

    def _count(self, is_last: bool = False) -> None:
        now = time.monotonic()
        if self._frames + self._broken and (is_last or now >= self._counted_at + SAY_SEEN_S):
            self._counted_at = now
            self._say(wire.Seen(self._frames, self._broken, self._lag_s))

    def _end(self, failure: CameraFailed) -> None:
        deadline = time.monotonic() + LAST_FRAMES_S
        while self._unsent and time.monotonic() < deadline and not self._stopping.is_set():
            time.sleep(0.005)
        self._count(is_last=True)
        self._last_word(failure, self._source.close)

    def _last_word(self, failure: CameraFailed, close: Callable[[], None] = lambda: None) -> None:
        try:
            password, reason = self._connection.password, failure.reason
            for secret in (password, quote(password, safe="")) if password else ():
                reason = reason.replace(secret, "***")
            self._say(wire.Failed(reason, failure.is_final))
            close()
        finally:
            os._exit(0)

    # -- on the encoder's thread --

    def _encode(self) -> None:
        while True:
            take, snapshot = self._shots.get()
            try:
                content = encode(snapshot.picture, self._connection.max_pixels)
                if content is None:  # the next frame answers this request, before all later ones
                    with self._guard:
                        self._unsent -= 1
                        self._broken += 1
                        self._asked.appendleft(take)
                else:
                    self._hand_over(take, content, snapshot.came_at)
            except CameraFailed as error:
                self._last_word(error)
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: memory, mostly
                self._last_word(CameraFailed(f"{type(error).__name__}: {error}"))

    def _hand_over(self, take: wire.Take, content: bytes, came_at: float) -> None:
        self._say(wire.Taken(take.number, time.monotonic() - came_at), content)
        with self._guard:
            self._unsent -= 1

    # -- on both threads --

    def _say(self, message: wire.Message, frame: bytes = b"") -> None:
        try:
            self._agent.send(wire.encode(message, frame))
        except OSError:  # the agent has disconnected
            os._exit(0)


def encode(picture: Picture, max_pixels: int) -> bytes | None:
    """The image file; None for a JPEG that cannot be decoded. Raises CameraFailed for more than ``max_pixels``."""
    if isinstance(picture, bytes):
        return None if decoded_jpeg(picture, max_pixels) is None else picture
    _check_size(picture, max_pixels)
    if isinstance(picture, DeepPixels):
        return deep_png(picture.values, picture.bits)
    pixels = picture if isinstance(picture, np.ndarray) else picture.to_ndarray(format="bgr24")
    is_encoded, content = cv2.imencode(".png", pixels)
    if not is_encoded:
        raise CameraFailed(f"a picture of {pixels.shape} {pixels.dtype} pixels cannot be written as PNG")
    return content.tobytes()


def _check_size(picture: NDArray[Any] | DeepPixels | VideoFrame, max_pixels: int) -> None:
    shown = picture.values if isinstance(picture, DeepPixels) else picture
    height, width = shown.shape[:2] if isinstance(shown, np.ndarray) else (shown.height, shown.width)
    check_size(height, width, max_pixels)
