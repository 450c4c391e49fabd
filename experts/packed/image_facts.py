"""Cache of how ONNX files want their images, beside the packed weights: reading a catalog opens no model file.

Facts are read from a file once, when its expert is added or packed. They hold for the same labels, while the file's
size, times and inode stay.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from experts.backends.onnx.layouts import ImageFacts, image_facts
from experts.errors import ExpertError
from experts.expert import Fit, Orientation
from experts.filesystem import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from experts.expert import Expert

FACTS_NAME = "onnx-images.json"


class KeptImageFacts:
    """Facts by expert. ``folder``: holds packed weights; None: no cache."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / FACTS_NAME
        self._kept: dict[str, dict[str, str | None]] = {}
        with suppress(OSError, ValueError, TypeError):
            if self._file is not None:
                self._kept = dict(json.loads(self._file.read_bytes()))

    def of(self, expert: Expert) -> ImageFacts:
        """Kept facts, else the file's own. Raises as ``image_facts``."""
        with suppress(OSError, KeyError, ValueError, TypeError):
            kept = self._kept[expert.id]
            if kept["source"] == _source(expert):
                fit = None if kept["fit"] is None else Fit(kept["fit"])
                return ImageFacts(fit, Orientation(str(kept["orientation"])), kept.get("detector"))
        return image_facts(expert)

    def keep(self, experts: Iterable[Expert]) -> None:
        """Write the facts of all experts of a line. A failed write only costs a later read."""
        kept: dict[str, dict[str, str | None]] = {}
        for expert in experts:
            if expert.architecture == "onnx" and expert.task is None:
                with suppress(OSError, ExpertError):  # packing reports what is wrong with the file
                    facts = self.of(expert)
                    kept[expert.id] = {
                        "source": _source(expert), "fit": facts.fit, "orientation": facts.orientation,
                        "detector": facts.detector,
                    }  # fmt: skip
        if kept != self._kept and self._file is not None:
            with suppress(OSError), whole_file(self._file, has_rivals=True) as file:
                file.write(json.dumps(kept).encode())
            self._kept = kept


def _source(expert: Expert) -> str:
    status = expert.weights.stat()
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    named = "" if expert.detector is None else f" {expert.detector}"
    return f"{expert.weights} {status.st_size} {times} {status.st_ino} {json.dumps(expert.labels)}{named}"
