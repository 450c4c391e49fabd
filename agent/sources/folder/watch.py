"""State of a watched folder, and its hints: the kernel's events, or rescans alone.

Guarantees: hints are of the folder that lies there now; each change of state is logged once.
"""

from __future__ import annotations

import errno
import logging
from enum import StrEnum
from typing import TYPE_CHECKING

from agent.sources.folder.files.hints import observe, stop_observing
from experts.filesystem import filesystem_type, tells_changes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from watchdog.observers.api import BaseObserver

    from agent.sources.folder.files.hints import Hint

log = logging.getLogger(__name__)


class SourceState(StrEnum):
    STOPPED = "stopped"
    ONLINE = "online"
    OFFLINE = "offline"


class FolderWatch:
    """State of one folder. ``note`` is called with each hint, from other threads."""

    def __init__(self, path: Path, note: Callable[[Hint], None]) -> None:
        self.state = SourceState.STOPPED
        self.is_polled = True
        self._path = path
        self._note = note
        self._observer: BaseObserver | None = None
        self._was_mounted = False

    @property
    def is_online(self) -> bool:
        return self.state is SourceState.ONLINE

    def go_online(self, *, has_thread: bool) -> bool:
        """Begin to watch a folder that can be read (again); False if it is watched already.

        ``has_thread``: a thread waits for hints; otherwise the folder is polled.
        """
        if self.is_online:
            return False
        self.state = SourceState.ONLINE
        self.is_polled = not tells_changes(filesystem_type(self._path))
        if has_thread and not self.is_polled:
            self._observer = observe(self._path, self._note)
            self.is_polled = self._observer is None
        log.info("intake_online folder=%s polled=%s", self._path, self.is_polled)
        return True

    def check_mount(self) -> None:
        """Raises OSError where a share was mounted and nothing is now: its bare mount point is not the folder."""
        is_mounted = self._path.is_mount()
        if self._was_mounted and not is_mounted:
            raise OSError(errno.ENODEV, "nothing is mounted there any more")
        self._was_mounted = is_mounted

    def go_offline(self, error: OSError) -> None:
        if self.state is not SourceState.OFFLINE:
            log.error("intake_offline folder=%s reason=%s: looked for again", self._path, error.strerror)
        self.stop(SourceState.OFFLINE)

    def stop(self, state: SourceState) -> None:
        """Stop the hints: another folder may lie in this place from now on."""
        self.state = state
        observer, self._observer = self._observer, None
        if observer is not None:
            stop_observing(observer)
