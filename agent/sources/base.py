"""Contract of a source of a line's subjects.

A source gets the verdict of each image that it offered or refused: once, after the commit of its rows. After a crash
it gets none: the next start offers the image again, from a source that ``keeps_images``, otherwise from the journal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from agent.faults.errors import OrderRefused, Reason
from experts.images import DEFAULT_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from agent.config import LineConfig
    from agent.subject import SourceStatus, Subject
    from experts.expert import Verdict


def local_time() -> datetime:
    return datetime.now(UTC).astimezone()


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Subject, with the bytes of its image file.

    ``pieces``: parts that an earlier run accepted; empty if the current layout cuts the image.
    """

    subject: Subject
    image: bytes
    max_pixels: int = DEFAULT_MAX_PIXELS
    pieces: tuple[Subject, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftOver:
    """Image that an earlier run accepted and did not judge. ``number``: place of its bytes in the journal."""

    number: int
    pieces: tuple[Subject, ...]


class Line(Protocol):
    """The line, for its sources. For any thread; no call waits for an expert."""

    @property
    def config(self) -> LineConfig:
        """Line file in service."""

    @property
    def left_overs(self) -> Sequence[LeftOver]:
        """Images of an earlier run, oldest first."""

    def has_room(self, source: Source) -> bool:
        """True while the source may take in one more image."""

    def expects(self, subject: Subject, source: Source) -> bool:
        """True if the image must be read and offered. False: its verdict is known, or will be without the image."""

    def offer_image(self, arrival: Arrival, source: Source) -> None:
        """Judge the image; the source's ``image_accepted`` and then ``verdict_committed`` are called."""

    def refuse_subject(self, subject: Subject, reason: str, source: Source) -> None:
        """Commit UNKNOWN for a subject that has no image."""

    def reading(self, subject: Subject) -> AbstractContextManager[object]:
        """Context: an end of the process inside counts against the subject."""

    def reserve_key(self, key: str, asked_sha256: str) -> bool:
        """Reserve a caller's key until ``release_key``; False if an equal request had it. Raises OrderRefused."""

    def release_key(self, key: str) -> None:
        """The request under the key is durable, or was refused."""

    def journaled_image(self, number: int) -> bytes | None:
        """Bytes of a left-over's image; None if it has ended. Raises sqlite3.Error and OSError."""


class Source(ABC):
    """Source of a line. Methods are called on any thread, and must not wait, except with a timeout."""

    keeps_images = False  # True: images survive the process in the source; False: the line journals them
    leaves_images = False  # True: judged images stay where they are
    skips_duplicates = False  # True: equal bytes for one part get the first verdict

    def __init__(self, name: str) -> None:
        self.name = name
        self.placed: Callable[[str, str], None] = lambda key, place: None  # told where an image's file was put away

    @abstractmethod
    def start(self) -> None:
        """Begin to offer."""

    @abstractmethod
    def verdict_committed(self, subject: Subject, verdict: Verdict, reason: str | None) -> None:
        """The worst verdict of the image's parts has been committed."""

    def image_accepted(self, subject: Subject) -> None:
        """The image is durable in the journal; the source may release it."""
        return

    def stop(self, timeout_s: float) -> bool:
        """Offer nothing more; False after ``timeout_s``. May be called again."""
        del timeout_s
        return True

    def close(self, timeout_s: float) -> None:
        """Process the verdicts so far; called last."""
        del timeout_s

    def check(self, config: LineConfig) -> None:
        """Raises ConfigError for a line file that the source cannot serve."""
        del config

    def reload(self, config: LineConfig) -> None:
        """Serve this line file from the next image on."""
        del config

    def trigger(self, board: str | None, board_type: str | None, key: str | None) -> str:
        """Take one image now; returns the key of its results. Raises OrderRefused."""
        raise OrderRefused(Reason.NOT_FOUND, f"no camera {self.name!r}")

    def status(self) -> SourceStatus | None:
        """State and counts of the source; None for a source without a status."""
        return None

    @property
    def held(self) -> int:
        """Images that the source keeps and could not release yet."""
        return 0

    def holds(self, key: str) -> bool:
        """True if the source still has the image of this result. Raises OSError."""
        del key
        return False

    def report_hangs(self) -> None:
        """Log operations that take too long; called periodically."""
        return
