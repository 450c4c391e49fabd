"""A synthetic camera that fails on command, and a camera's process that knows it.

`fault:PATH`: the file at PATH holds one word, which is read anew before each picture.

| word | what it does |
| --- | --- |
| stream | a picture every PERIOD_S, each brighter than the one before |
| lag | as stream, but pictures are LAG_S old |
| stall | no picture comes any more, and nothing ends |
| garble | pictures look like a JPEG and are none |
| end | the camera ends the connection |
| refuse | the camera refuses to be opened; else as end |
| leak | as end, with a reason that holds the password, as a library's may |
| break | the camera's process breaks as by a fault of the program |
| hang | a call into C never returns, and no other thread of the process runs: only a kill ends it |
| die | the process ends as by a fault in C |
"""

import ctypes
import signal
import time
from pathlib import Path

import numpy as np

from agent.faults.errors import CameraFailed
from agent.sources.cameras.pictures import registry as pictures
from agent.sources.cameras.pictures.source import Snapshot

PERIOD_S = 0.02
LAG_S = 3.0
SIZE = (48, 64)
NO_JPEG = b"\xff\xd8\xff\xc4 no picture at all \xff\xd9"


class FaultSource:
    def __init__(self, connection):
        self._connection = connection
        self._path = Path(connection.place)
        self._number = 0

    def open(self, deadline):
        del deadline
        word = self._word()
        if word == "refuse":
            raise CameraFailed("the camera refuses - say another word")
        if word == "hang":
            _hang()

    def read(self, deadline):
        time.sleep(min(PERIOD_S, max(deadline - time.monotonic(), 0.0)))
        word = self._word()
        match word:
            case "stall":
                time.sleep(max(deadline - time.monotonic(), 0.0))
                return None
            case "garble":
                return Snapshot(NO_JPEG, time.monotonic())
            case "end" | "refuse":
                raise CameraFailed("the camera ended the connection")
            case "leak":
                raise CameraFailed(f"cannot go on with {self._connection.user}:{self._connection.password}@camera")
            case "hang":
                _hang()
            case "die":
                signal.raise_signal(signal.SIGSEGV)  # of this thread, so that it does not go on to a picture
        self._number += 1
        picture = np.full((*SIZE, 3), self._number % 256, np.uint8)
        return Snapshot(picture, time.monotonic() - (LAG_S if word == "lag" else 0.0))

    def close(self):
        """There is nothing to close."""

    def _word(self):
        return self._path.read_text().strip()


def _hang():
    """Hang in C with the interpreter's lock held, as a faulty driver does."""
    while True:
        ctypes.PyDLL(None).pause()


real_source_of = pictures.source_of


def source_of(connection):
    if connection.scheme != "fault":
        return real_source_of(connection)
    if Path(connection.place).read_text() == "break":
        raise KeyError("of this name")
    return FaultSource(connection)


pictures.source_of = source_of

if __name__ == "__main__":
    from agent.sources.cameras.child import main

    main()
