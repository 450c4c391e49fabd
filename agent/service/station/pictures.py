"""Images of results as a browser shows them: upright, cut, and no larger than asked.

Guarantees: one image of a place is read at a time, on a thread of low priority, so that judging goes on; a broken,
missing or too large file is NOT_FOUND with the reason, and so is one that holds another image than the judged one. A
share that hangs is NOT_NOW, and keeps no image of another place waiting. Thumbnails stay in bounded memory.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from PIL import Image

from agent.doors.http.station import Shown
from agent.faults.errors import OrderRefused, Reason
from agent.runtime.images.sources import ImageFile
from agent.runtime.machine.threads import give_way
from agent.service.station.places import PlaceReader
from agent.sources.folder.files.shelves import image_file, image_root
from experts.errors import ImageError, ImageUnreadable
from experts.expert import Orientation
from experts.images import decode_image, upright_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeVar

    import numpy as np
    from numpy.typing import NDArray

    from agent.config import LineConfig
    from agent.records.verdict import Result

    Made = TypeVar("Made")

PATIENCE_S = 4.0
SIZE_S = 1.0
SHOWN_PIXELS = 32_000_000  # a larger image takes too much of the box to be decoded for a page
WIDTH = 1600  # unless another is asked
THUMBNAIL = 160
LOSSLESS_PIXELS = 256 * 256  # a small part is shown without loss
QUALITY = 88
THUMBNAILS_BYTES = 16 * 1024 * 1024
FRAME_PIXELS = 16_000_000  # of the frame that is kept for its next part


class Pictures:
    """For any thread. Call ``stop`` at the end."""

    def __init__(self, config: Callable[[], LineConfig]) -> None:
        self._config = config
        self._lock = threading.Lock()  # guards the places and the thumbnails
        self._places: dict[tuple[Path, bool], PlaceReader] = {}  # by root, and for sizes alone or for pixels
        self._thumbnails: OrderedDict[tuple[int, str], Shown] = OrderedDict()
        self._thumbnails_bytes = 0
        self._frame: tuple[object, NDArray[np.uint8]] | None = None  # by the open file, as its path may be used again

    def part(self, row: Result, width: int | None) -> Shown:
        """The part's image. Raises OrderRefused, as all below do."""
        return self._made(row, lambda: _encoded(self._pixels(row, width or WIDTH), width or WIDTH))

    def frame(self, row: Result, width: int | None) -> Shown:
        """The whole image that a part was cut from."""
        return self._made(row, lambda: _encoded(_whole(self._file(row), width or WIDTH), width or WIDTH))

    def thumbnail(self, row: Result) -> Shown:
        return self._made(row, lambda: self._thumbnail(row))

    def size(self, row: Result) -> tuple[int, int] | None:
        """(height, width) of the part's image, by its file's header; None without a readable file."""
        box = row.subject.box
        if box is not None:
            return box[3] - box[1], box[2] - box[0]
        try:
            return self._made(row, lambda: upright_size(self._file(row).path), is_size=True)
        except OrderRefused:
            return None

    def stop(self) -> None:
        for place in self._places.values():
            place.stop()

    def _made(self, row: Result, make: Callable[[], Made], *, is_size: bool = False) -> Made:
        try:
            return self._place(row, is_size).made(lambda: _made_again(make), SIZE_S if is_size else PATIENCE_S)
        except (ImageError, OSError, MemoryError) as error:
            raise OrderRefused(Reason.NOT_FOUND, f"the image cannot be shown: {error}", field="seq") from None

    def _place(self, row: Result, is_size: bool) -> PlaceReader:
        """Reader of the folder, or of the kept images. A size does not wait for pixels."""
        root = image_root(self._config(), row.subject.key, row.kept_as)
        with self._lock:
            if (root, is_size) not in self._places:
                self._places[root, is_size] = (
                    PlaceReader("picture-sizes", lambda: None) if is_size else PlaceReader("pictures", give_way)
                )
            return self._places[root, is_size]

    def _thumbnail(self, row: Result) -> Shown:
        about = (row.seq, row.subject.key)
        with self._lock:
            picture = self._thumbnails.pop(about, None)
            self._thumbnails_bytes -= 0 if picture is None else len(picture.content)
        if picture is None:
            picture = _encoded(self._pixels(row, THUMBNAIL), THUMBNAIL)
        with self._lock:
            self._thumbnails[about] = picture
            self._thumbnails_bytes += len(picture.content)
            while self._thumbnails_bytes > THUMBNAILS_BYTES:
                self._thumbnails_bytes -= len(self._thumbnails.popitem(last=False)[1].content)
        return picture

    def _file(self, row: Result) -> ImageFile:
        about = self._config(), row.subject.key, row.finished_at, row.kept_as, row.place
        path = image_file(*about) or image_file(*about)  # it may be put away between two places of a lookup
        if path is None:
            kept = "it was not kept, or is no longer there" if row.kept_as is None else "it is no longer there"
            raise OrderRefused(Reason.NOT_FOUND, f"result {row.seq} has no image: {kept}", field="seq")
        return ImageFile(path, SHOWN_PIXELS, row.seen_sha256)

    def _pixels(self, row: Result, width: int) -> NDArray[np.uint8]:
        file, box = self._file(row), row.subject.box
        if box is None:
            return _whole(file, width)
        seen = file, _stamp(os.stat(file.path))
        frame = self._frame
        if frame is None or frame[0] != seen:
            self._frame = frame = None  # before the next one needs room
            self._frame = frame = (seen, _whole(file, None))
        left, top, right, bottom = box
        pixels = frame[1][top:bottom, left:right]
        if not pixels.size:
            raise ImageUnreadable(file.path.name, f"its part {list(box)} is outside of it")
        if frame[1].size > 3 * FRAME_PIXELS:
            self._frame = None
        return pixels


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _whole(file: ImageFile, width: int | None) -> NDArray[np.uint8]:
    """Upright pixels; of a JPEG not many more than ``width`` needs."""
    least = None if width is None else (width, width)
    content = file.read(file.path.name)
    return decode_image(content, file.path.name, SHOWN_PIXELS, least=least).turned(Orientation.EXIF)


def _made_again(make: Callable[[], Made]) -> Made:
    """A judged file may be put away between its lookup and its reading."""
    try:
        return make()
    except (ImageError, OSError) as error:
        if not isinstance(error.__cause__ or error, FileNotFoundError):
            raise
        return make()


def _encoded(pixels: NDArray[np.uint8], most: int) -> Shown:
    picture = Image.fromarray(pixels)
    picture.thumbnail((most, most), Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    if picture.width * picture.height <= LOSSLESS_PIXELS:
        picture.save(buffer, "PNG")
        return Shown(buffer.getvalue(), "image/png")
    picture.save(buffer, "JPEG", quality=QUALITY)
    return Shown(buffer.getvalue(), "image/jpeg")
