"""State of a watched folder, and hints from the kernel: a file was closed, renamed in or created.

Hints only make the intake faster: events are lost when the queue overflows, in new folders, and on every network
share. A rescan finds the missed files. Changes in the agent's own folders give no hint.
Guarantees: hints belong to the current folder at the path; each change of state is logged once.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)

from agent.places.mounts import MountedFolder, filesystem_type, tells_changes
from agent.sources.folder.files.inbox import is_claim, is_own
from agent.sources.folder.files.readiness import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watchdog.observers.api import BaseObserver

log = logging.getLogger(__name__)

STOP_S = 1.0  # for watchdog's threads to end
EVENTS: list[type[FileSystemEvent]] = [
    FileClosedEvent, FileCreatedEvent, FileMovedEvent, DirCreatedEvent, DirMovedEvent,
]  # fmt: skip


class SourceState(StrEnum):
    STOPPED = "stopped"
    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Hint:
    """Event on a file; on a folder if ``relpath`` is None."""

    relpath: str | None
    evidence: Evidence = Evidence.NONE


class FolderWatch:
    """State of one folder. ``note`` is called with each hint, from watchdog's threads. ``alarm``: why it is OFFLINE."""

    def __init__(self, path: Path, note: Callable[[Hint], None]) -> None:
        self.state = SourceState.STOPPED
        self.alarm: str | None = None
        self._path = path
        self._note = note
        self._observer: BaseObserver | None = None
        self._place = MountedFolder(path)

    @property
    def is_online(self) -> bool:
        return self.state is SourceState.ONLINE

    @property
    def is_polled(self) -> bool:
        return self._observer is None

    def go_online(self, *, has_thread: bool) -> bool:
        """Watch a folder that is readable (again); False if already watched.

        ``has_thread``: a thread waits for hints; otherwise the folder is polled.
        """
        if self.is_online:
            return False
        self.state, self.alarm = SourceState.ONLINE, None
        if has_thread and tells_changes(filesystem_type(self._path)):
            self._observe()
        log.info("intake_online folder=%s polled=%s", self._path, self.is_polled)
        return True

    def remember_in(self, state: Path) -> None:
        """Know from earlier runs where the folder's share is mounted."""
        self._place = MountedFolder(self._path, state / "places")

    def check_mount(self) -> None:
        """Raises OSError if a share was mounted and no longer is: its bare mount point is not the folder."""
        self._place.find()

    def go_offline(self, error: OSError) -> None:
        if self.state is not SourceState.OFFLINE:
            log.error("intake_offline folder=%s reason=%s: looked for again", self._path, error.strerror)
        self.alarm = error.strerror or str(error)
        self.stop(SourceState.OFFLINE)

    def stop(self, state: SourceState) -> None:
        """Stop the hints: another folder may be at this path from now on."""
        self.state = state
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.stop()
            if observer.is_alive():
                observer.join(STOP_S)

    def _observe(self) -> None:
        # watchdog adds a folder that appears meanwhile twice, and warns of it: both watches work
        warnings.filterwarnings("ignore", "Callback with id", RuntimeWarning, r"watchdog\.")
        try:
            from watchdog.observers.inotify import InotifyObserver

            self._observer = InotifyObserver(generate_full_events=True)  # "full": renames from outside are events too
            listener = _Listener(self._path, self._note)
            self._observer.schedule(listener, str(self._path), recursive=True, event_filter=EVENTS)
            self._observer.start()
        except (ImportError, OSError) as error:
            log.warning("intake_without_events folder=%s reason=%s: rescans only", self._path, error)
            self.stop(self.state)


class _Listener(FileSystemEventHandler):
    def __init__(self, root: Path, note: Callable[[Hint], None]) -> None:
        self._root = str(root)
        self._prefix = f"{root}/"
        self._note = note

    def dispatch(self, event: FileSystemEvent) -> None:
        source, target = _text(event.src_path), _text(event.dest_path)
        if event.is_directory:
            if self._is_news(source) or self._is_news(target):
                self._note(Hint(None))
        elif isinstance(event, FileMovedEvent):
            if self._is_news(target) and not is_claim(source.removeprefix(self._prefix)):
                self._note(Hint(target.removeprefix(self._prefix), Evidence.RENAMED))
        elif self._is_news(source):
            evidence = Evidence.CLOSED if isinstance(event, FileClosedEvent) else Evidence.NONE
            self._note(Hint(source.removeprefix(self._prefix), evidence))

    def _is_news(self, path: str) -> bool:
        if path == self._root:
            return True
        return path.startswith(self._prefix) and not is_own(path.removeprefix(self._prefix))


def _text(path: bytes | str | None) -> str:
    if path is None:
        return ""
    return path if isinstance(path, str) else path.decode("utf-8", "surrogateescape")
