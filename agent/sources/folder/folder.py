"""Watched folder as a source: each file is offered exactly once, when complete, and put away after its commit.

Guarantees: a file is claimed by one rename before it is offered, so only one of several agents gets it. A file claimed
but not settled is offered again under the same key: at the next start, or after an error at the next rescan.
A full disk or a missing share is retried. A step costs O(log n) per changed file; a rescan checks every file, and takes
at most a tenth of the time. Only the folder's own threads wait for its disk.
Structure: `step` does all work, with time as a parameter; its thread only waits. Hints wake the thread.
``claiming`` decides on waiting files, ``reading`` reads the claimed, ``custody`` puts away.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.sources.base import Arrival, Source, local_time
from agent.sources.folder.claiming import ClaimCallbacks, Claimer
from agent.sources.folder.custody import Custody
from agent.sources.folder.files.identity import printable
from agent.sources.folder.files.inbox import Inbox
from agent.sources.folder.files.naming import naming_of
from agent.sources.folder.files.readiness import Evidence, Rule
from agent.sources.folder.files.selection import MARKER, FileSelection
from agent.sources.folder.files.sidecar import SUFFIX
from agent.sources.folder.reading import ImageReader, ReaderCallbacks
from agent.sources.folder.waiting import WaitingFiles
from agent.sources.folder.watch import FolderWatch, SourceState
from agent.subject import SourceStatus, image_key, seen_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from agent.config import LineConfig
    from agent.line_file.intake import FolderSection
    from agent.sources.base import Line
    from agent.sources.folder.claiming import ClaimedImage
    from agent.sources.folder.files.naming import Naming
    from agent.sources.folder.watch import Hint
    from agent.subject import Subject
    from experts.expert import Verdict

log = logging.getLogger(__name__)

READ_BYTES = 256 * 1024 * 1024  # of images read and not judged yet, over all folders
PIXEL_BYTES = 3  # of a decoded frame
NO_ROOM_S = 0.25  # between two checks for room in the agent
BREATH_S = 0.02  # between two steps, to handle the events of one burst together
MOST_LOGGED = 100  # endings
SHARED_SHELF = (
    "{shelf} is the agent's own folder {own}, as this disk compares names without case: images that another program "
    "writes there are not judged - have it write into a folder of another name, and call this one {own}"
)
SCAN_SHARE = 10  # scans of a huge folder take at most 1/10 of the time


def folder_sources(config: LineConfig, line: Line) -> Sequence[Source]:
    folders = config.intake.folders
    return [
        FolderSource(each, naming_of(each, config), line, owner=config.line, budget_bytes=READ_BYTES // len(folders))
        for each in folders
    ]


class FolderSource(Source):
    """``owner`` names the agent (its line) in `.work/`: two agents on one folder need two names.

    ``budget_bytes``: limit of images read and not judged; ``wall``: dates of arrivals and shelves.
    """

    keeps_images = True

    def __init__(
        self,
        section: FolderSection,
        naming: Naming,
        line: Line,
        *,
        owner: str,
        budget_bytes: int = READ_BYTES,
        wall: Callable[[], datetime] = local_time,
    ) -> None:
        super().__init__(str(section.path))
        self.skips_duplicates = section.duplicate == "skip"
        self.leaves_images = section.after == "keep"
        self._section = section
        self._line = line
        self._clock = time.monotonic
        self._sizes: dict[str, int] = {}  # by key: bytes of offered images
        selection = FileSelection(section.ignore, section.pattern)
        self._inbox = Inbox(section.path, owner, has_sidecars=section.has_sidecars, selection=selection)
        self._custody = Custody(section, self._inbox, wall, lambda key, place: self.placed(key, place))
        self._waiting = WaitingFiles(_rule(section))
        callbacks = ClaimCallbacks(self._image_claimed, self._subject_refused, lambda: line.has_room(self), wall)
        self._claimer = Claimer(section, naming, self._inbox, self._waiting, self._custody, callbacks)
        self._watch = FolderWatch(section.path, self._note)
        self._reader = ImageReader(
            section.path.name,
            ReaderCallbacks(
                read=self._image_read,
                changed=self._image_changed,
                unreadable=lambda image, reason: self._subject_refused(image.subject, reason),
                is_sound=lambda image: self._inbox.is_sound(is_claimed=image.file.is_ours),
                during_large=lambda image: line.reading(image.subject),
            ),
            budget_bytes=budget_bytes,
            max_pixels=section.max_pixels,
        )
        self._hints: queue.SimpleQueue[Hint] = queue.SimpleQueue()
        self._was_online = False
        self._shelf_alarm: str | None = None
        self._logged: set[str] = set()  # endings of files that are left alone
        self._ignores_next_scan = section.ignore_existing
        self._next_scan = float("-inf")
        self._rested_at = float("-inf")  # end of the pause after a scan, by SCAN_SHARE
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # -- the contract --

    def start(self) -> None:
        """Read and watch, in two threads. A folder that was never there is made; one that is away is OFFLINE."""
        self._reader.start()
        self._watch.remember_in(self._line.config.state)
        try:
            self._watch.check_mount()
            self._section.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("intake_folder_not_made folder=%s reason=%s", self._section.path, error.strerror)
        self._thread = threading.Thread(target=self._run, name=f"intake-{self._section.path.name}", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        self._reader.stop(timeout_s)
        return True

    def close(self, timeout_s: float) -> None:
        """Stop claiming, and put away settled files. Other files stay claimed for the next start."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def reload(self, config: LineConfig) -> None:
        self._claimer.naming = naming_of(self._section, config)

    def verdict_committed(self, subject: Subject, verdict: Verdict, reason: str | None) -> None:
        self._reader.release_bytes(self._sizes.pop(subject.key, 0))
        self._custody.settle(subject.key, verdict, reason)
        self._wake.set()

    def status(self) -> SourceStatus:
        return SourceStatus(
            self.name,
            "folder",
            str(self._watch.state),
            received=self._claimer.received,
            waiting=len(self._waiting) + self._claimer.unoffered + self._reader.waiting,
            alarm=self._claimer.claim_alarm
            or self._custody.alarm
            or self._reader.alarm
            or self._watch.alarm
            or self._shelf_alarm,
            held_bytes=self._reader.held_bytes,
            left_alone=sum(self._inbox.left_alone.values()),
        )

    @property
    def held(self) -> int:
        """Claimed or refused files that are not put away yet."""
        return self._custody.held

    def holds(self, key: str) -> bool:
        """True if the file of this key (an image's or a part's) is in the folder unchanged. Raises OSError.

        If files are kept, a missing file counts as present while its folder is absent, as with a share.
        """
        return self._holds(key) or self._holds(image_key(key))

    def _holds(self, key: str) -> bool:
        relpath = self._inbox.relpath_of(key)
        if relpath is None:
            return False
        found = self._inbox.look(relpath)
        if found is None:
            return self._section.after == "keep" and not self._is_here()
        return self._inbox.seen_key(found.relpath, found.sighting) == seen_key(key)

    def _is_here(self) -> bool:
        """True if the listed folder is present and not empty, unlike a bare mount point."""
        try:
            is_listed = self._watch.is_online and self._inbox.inode() == self._waiting.root
            return is_listed and not self._inbox.is_empty()
        except FileNotFoundError:
            return False

    def report_hangs(self) -> None:
        self._reader.report_hang()

    # -- lifecycle of an image --

    def _image_claimed(self, image: ClaimedImage) -> None:
        if self._line.expects(image.subject, self):
            self._reader.read_image(image)

    def _subject_refused(self, subject: Subject, reason: str) -> None:
        self._line.refuse_subject(subject, reason, self)

    def _image_read(self, image: ClaimedImage, content: bytes) -> None:
        """Offer the image. A frame counts with its pixels, which stay decoded until its last part is judged."""
        subject = image.subject
        layout = self._line.config.layouts.get(subject.board_type or "") if subject.shows_board else None
        pixels_bytes = 0 if layout is None else layout.size[0] * layout.size[1] * PIXEL_BYTES
        self._reader.add_bytes(pixels_bytes)
        self._sizes[subject.key] = len(content) + pixels_bytes
        self._line.offer_image(Arrival(subject, content, self._section.max_pixels), self)

    def _image_changed(self, image: ClaimedImage) -> None:
        """Withdraw an image whose file was replaced: it gets no verdict."""
        self._custody.withdraw(image.subject.key)
        self._wake.set()

    # -- on the folder's thread --

    def step(self, now: float) -> float:
        """Do all due work; returns the seconds until the next step."""
        for file in self._custody.work(now):
            self._waiting.reconsider(file.relpath)
            self._scan_early(now)
        self._handle_hints(now)
        if now >= self._next_scan:
            self._scan(now)
        if self._watch.is_online:
            self._claimer.claim_due(now)
        return max(self._next_step(now) - now, 0.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                delay_s = self.step(self._clock())
            except Exception:  # boundary of the thread: the next rescan finds the file again
                log.exception("intake_step_failed folder=%s", self._section.path)
                delay_s = self._section.poll_s
            self._wake.wait(delay_s)
            self._wake.clear()
            self._stopping.wait(BREATH_S)
        self._watch.stop(SourceState.STOPPED)
        self._custody.close()
        self._inbox.leave()

    def _note(self, hint: Hint) -> None:
        self._hints.put(hint)
        self._wake.set()

    def _handle_hints(self, now: float) -> None:
        strongest: dict[str, Evidence] = {}
        while not self._hints.empty():
            hint = self._hints.get()
            if hint.relpath is None:
                self._scan_early(now)
            else:
                strongest[hint.relpath] = max(strongest.get(hint.relpath, Evidence.NONE), hint.evidence)
        for sidecar in [relpath for relpath in strongest if relpath.lower().endswith(SUFFIX)]:
            for relpath in self._waiting.beside(sidecar):
                strongest.setdefault(relpath, Evidence.NONE)
        for relpath, evidence in strongest.items():
            is_marker = relpath.lower().endswith(MARKER)
            try:
                found = self._inbox.look(relpath[: -len(MARKER)] if is_marker else relpath)
            except OSError:  # the folder has gone, which the next scan reports
                continue
            if found is not None:
                self._waiting.see(found, now, Evidence.NONE if is_marker else evidence)
            elif is_marker:  # its name may lack the image's suffix
                self._scan_early(now)

    def _scan_early(self, now: float) -> None:
        self._next_scan = min(self._next_scan, max(now, self._rested_at))

    def _scan(self, now: float) -> None:
        started = self._clock()
        try:
            self._watch.check_mount()
            if self._waiting.turn_to(self._inbox.inode()):
                log.warning("intake_folder_replaced folder=%s: it is another one than before", self._section.path)
                self._watch.stop(SourceState.OFFLINE)
            listed = list(self._inbox.scan())
            if self._watch.go_online(has_thread=self._thread is not None):
                listed = list(self._inbox.scan())  # again, for files that arrived before the events
            self._tell_what_is_not_judged(self._inbox.shared_shelf())
        except OSError as error:
            self._watch.go_offline(error)
            self._waiting.clear()
            self._next_scan = now + self._section.poll_s
            return
        if self._ignores_next_scan:
            self._ignores_next_scan = False
            for found in listed:  # whatever becomes of their modes: a backup may change those of all
                self._waiting.pass_over(found.relpath, replace(found.sighting, ctime_ns=0))
        self._recover()
        self._waiting.see_all(listed, now)
        self._claimer.forget_all_but({found.relpath for found in listed})
        for relpath in self._waiting.find_stale(now):
            log.warning("intake_stale file=%s: incomplete, or held open by its writer", printable(relpath))
        ended = self._clock()
        self._rested_at = ended + (SCAN_SHARE - 1) * (ended - started)
        self._next_scan = max(now + self._section.poll_s, self._rested_at)

    def _tell_what_is_not_judged(self, shelf: str | None) -> None:
        alarm = None if shelf is None else SHARED_SHELF.format(shelf=printable(shelf), own=shelf.casefold())
        if alarm is not None and alarm != self._shelf_alarm:
            log.error("intake_shelf_shared folder=%s: %s", self._section.path, alarm)
        self._shelf_alarm = alarm
        for ending in self._inbox.left_alone.keys() - self._logged if len(self._logged) < MOST_LOGGED else ():
            self._logged.add(ending)
            log.warning(
                "intake_left_alone folder=%s ending=%r files=%d: no image ends so; not judged, and left in place",
                str(self._section.path), printable(ending), self._inbox.left_alone[ending],
            )  # fmt: skip

    def _recover(self) -> None:
        """Offer claimed files of an earlier run, or abandoned by an error."""
        self._custody.put_back_again()
        found = list(self._inbox.recover(self._custody.places() | self._claimer.places()))
        self._claimer.recover(found)
        if found or not self._was_online:
            log.info("intake_recovered folder=%s files=%d", self._section.path, len(found))
        self._was_online = True

    def _next_step(self, now: float) -> float:
        due = self._waiting.next_due
        if self._claimer.unoffered or (due is not None and due <= now):
            due = now + NO_ROOM_S
        return min(at for at in (self._next_scan, self._custody.next_retry, due) if at is not None)


def _rule(section: FolderSection) -> Rule:
    rule = Rule(section.ready, stale_after_s=section.stale_after_s, needs_sidecar=section.has_sidecars)
    if section.settle_ms is None:
        return rule
    return replace(rule, closed_settle_s=section.settle_ms / 1000, unseen_settle_s=section.settle_ms / 1000)
