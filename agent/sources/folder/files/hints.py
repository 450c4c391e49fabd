"""Hints from the kernel: a file was closed, renamed in or created.

Hints make the intake quick, never correct: events are lost when the queue overflows, in new folders, and on every
network share. A rescan finds the files that they miss. Changes in the agent's own folders give no hint.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
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

from agent.sources.folder.files.inbox import is_claim, is_own
from agent.sources.folder.files.readiness import Evidence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watchdog.observers.api import BaseObserver

log = logging.getLogger(__name__)

STOP_S = 1.0  # for watchdog's threads to end
EVENTS: list[type[FileSystemEvent]] = [
    FileClosedEvent,
    FileCreatedEvent,
    FileMovedEvent,
    DirCreatedEvent,
    DirMovedEvent,
]


@dataclass(frozen=True, slots=True)
class Hint:
    """Something happened to this file; to a folder where ``relpath`` is None."""

    relpath: str | None
    evidence: Evidence = Evidence.NONE


def observe(root: Path, note: Callable[[Hint], None]) -> BaseObserver | None:
    """Call ``note`` with each hint below a folder, on watchdog's threads. None, and a log line, without events."""
    # a folder made while it is being added is added twice, which watchdog tells as a warning and does right
    warnings.filterwarnings("ignore", "Callback with id", RuntimeWarning, r"watchdog\.")
    observer: BaseObserver | None = None
    try:
        from watchdog.observers.inotify import InotifyObserver

        observer = InotifyObserver(generate_full_events=True)  # "full": renames from outside are told as such
        observer.schedule(_Listener(root, note), str(root), recursive=True, event_filter=EVENTS)
        observer.start()
    except (ImportError, OSError) as error:
        log.warning("intake_without_events folder=%s reason=%s: rescans only", root, error)
        if observer is not None:
            stop_observing(observer)
        return None
    return observer


def stop_observing(observer: BaseObserver) -> None:
    observer.stop()
    if observer.is_alive():
        observer.join(STOP_S)


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
