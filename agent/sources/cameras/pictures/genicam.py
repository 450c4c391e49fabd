"""Industrial cameras (GigE Vision, USB3 Vision, CoaXPress) through GenICam: harvesters, and the maker's GenTL producer.

Producers are found in the folders, or files, of GENICAM_GENTL64_PATH. Settings, such as pixel format and trigger, are
made with the maker's tool and stored in the camera; this module changes none.
Guarantees: a picture is copied before its buffer is returned. A buffered picture gets the time at which the buffers
were last seen empty.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from agent.faults.errors import CameraFailed
from agent.sources.cameras.pictures.presentation import PresentationClock
from agent.sources.cameras.pictures.source import DeepPixels, Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agent.sources.cameras.pictures.source import CameraConnection, Picture

EXTRA = "GenICam cameras need harvesters - install it with: pip install 'coserve[genicam]'"
NO_PRODUCER = "no GenTL producer (.cti) is there - install the camera maker's, which sets GENICAM_GENTL64_PATH"
SHORTEST_S = 0.01  # harvesters takes a timeout of 0 as no timeout
GREY_BITS = {"Mono8": 8, "Mono10": 10, "Mono12": 12, "Mono14": 14, "Mono16": 16}
TO_BGR = {
    "BGR8": None,
    "RGB8": cv2.COLOR_RGB2BGR,
    "BGRa8": cv2.COLOR_BGRA2BGR,
    "RGBa8": cv2.COLOR_RGBA2BGR,
    "BayerRG8": cv2.COLOR_BayerRGGB2BGR,
    "BayerGR8": cv2.COLOR_BayerGRBG2BGR,
    "BayerGB8": cv2.COLOR_BayerGBRG2BGR,
    "BayerBG8": cv2.COLOR_BayerBGGR2BGR,
}


class GenicamSource:
    def __init__(self, connection: CameraConnection) -> None:
        self._serial = connection.place
        self._harvester: Any = None
        self._acquirer: Any = None
        self._opened_at = 0.0
        self._clock = PresentationClock(shortest_wait_s=0.0)

    def open(self, deadline: float) -> None:
        del deadline  # discovery has the producers' own limits; if it hangs, the supervisor kills the process
        try:
            from genicam.gentl import Helper
            from harvesters.core import Harvester
        except ImportError as error:
            raise CameraFailed(f"{EXTRA} ({error})", is_final=True) from error
        producers = producers_in(Helper.get_cti_files())
        if not producers:
            raise CameraFailed(NO_PRODUCER)
        try:
            self._harvester = Harvester()
            for producer in producers:
                self._harvester.add_file(str(producer))
            self._harvester.update()
            self._acquirer = self._harvester.create(self._device())
            self._opened_at = time.monotonic()
            self._acquirer.start()
        except CameraFailed:
            raise
        except Exception as error:  # a producer may raise anything
            raise CameraFailed(f"GenICam camera {self._serial}: {error or type(error).__name__}") from error

    def read(self, deadline: float) -> Snapshot | None:
        self._clock.ask()
        try:
            buffer = self._acquirer.try_fetch(timeout=max(deadline - time.monotonic(), SHORTEST_S))
            if buffer is None:
                return None
            try:
                self._clock.came(None)
                picture = _picture(buffer.payload.components)
                came_at = max(self._clock.came_at(None, time.monotonic()), self._opened_at)
                return None if picture is None else Snapshot(picture, came_at)
            finally:
                buffer.queue()
        except CameraFailed:
            raise
        except Exception as error:  # likewise
            raise CameraFailed(f"GenICam camera {self._serial}: {error or type(error).__name__}") from error

    def close(self) -> None:
        if self._acquirer is not None:
            self._acquirer.stop()
            self._acquirer.destroy()
        if self._harvester is not None:
            self._harvester.reset()

    def _device(self) -> int:
        """Index of the camera in the list of devices found."""
        found = [each.property_dict for each in self._harvester.device_info_list]
        names = [str(each.get("serial_number") or each.get("id_")) for each in found]
        if names.count(self._serial) == 1:
            return names.index(self._serial)
        if self._serial in names:
            raise CameraFailed(f"{names.count(self._serial)} GenICam cameras say that they are {self._serial}")
        there = f"there are {', '.join(names)}" if names else "none is found at all: is it on, is it in use?"
        raise CameraFailed(f"no GenICam camera has the serial number {self._serial} - {there}")


def producers_in(places: list[str]) -> list[Path]:
    """GenTL producers in these folders, or given as files; each once."""
    found: dict[Path, None] = {}
    for place in places:
        path = Path(place)
        found |= dict.fromkeys(sorted(path.glob("*.cti")) if path.is_dir() else [path] if path.is_file() else [])
    return list(found)


def _picture(components: list[Any]) -> Picture | None:
    """Picture in a buffer; None for an empty buffer, as after a lost packet."""
    if not components or components[0].data is None or not components[0].data.size:
        return None
    one = components[0]
    rows = np.asarray(one.data).reshape(one.height, -1)[:, : int(one.width * one.num_components_per_pixel)]
    return pixels_of(rows, one.data_format, one.width)


def pixels_of(rows: NDArray[Any], data_format: str, width: int) -> Picture:
    """Copy of a buffer's rows as pixels. Raises CameraFailed for an unknown format."""
    if data_format in GREY_BITS:
        bits = GREY_BITS[data_format]
        return rows.astype(np.uint8) if bits == 8 else DeepPixels(rows.astype(np.uint16), bits)
    if data_format not in TO_BGR:
        known = ", ".join((*GREY_BITS, *TO_BGR))
        raise CameraFailed(f"it sends {data_format} - set its PixelFormat to one of {known}")
    pixels = rows if data_format.startswith("Bayer") else rows.reshape(len(rows), width, -1)
    code = TO_BGR[data_format]
    return pixels.copy() if code is None else cv2.cvtColor(np.ascontiguousarray(pixels), code)  # type: ignore[return-value]
