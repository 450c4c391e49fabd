"""Images of cameras and callers: journaled, judged, stored, answered.

Guarantees: a request is accepted once it is on the disk; then it ends in exactly one stored verdict, also after
a crash. A request that every sender cancelled before it ran is withdrawn. A repeated key gets the same verdict, or is
refused for another request: the disk decides. The state of a key changes on the store's thread, in the order of
commits.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from agent.core.request import CANCELLED
from agent.faults.errors import OrderRefused, Reason
from agent.records.journal import Acceptance, JournalReader
from agent.runtime.images.sources import EncodedImage, Frame, FramePart
from agent.service.inspections.courses import UNJUDGED, Course
from agent.service.inspections.inspector import Submission
from agent.service.inspections.rows import judged_result, unknown
from agent.sources.base import LeftOver
from agent.subject import PART_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.core.request import Outcome
    from agent.records.result_writer import Recorded, ResultStore
    from agent.records.retention.archive import ImageKeeper
    from agent.records.verdict import Result
    from agent.runtime.images.sources import ImageSource
    from agent.service.inspections.inspector import Inspector
    from agent.service.inspections.verdicts import Verdicts
    from agent.subject import Subject

log = logging.getLogger(__name__)

REREAD_S = 0.5  # between two tries after a disk error


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """Stored verdict, with its times (0: of an earlier run). ``is_repeat``: judged for another sender."""

    result: Result
    course: Course
    is_repeat: bool = False


class Sender(Protocol):
    """Sender of an image. Called on the store's thread; does not wait."""

    def accepted(self) -> None:
        """The image's requests are durable. Called once."""

    def judged(self, judgement: StoredVerdict) -> None:
        """A request has its verdict. Called once per request."""

    def refused(self, key: str) -> None:
        """Another request has this key: the image gets no verdict."""


@dataclass(slots=True, eq=False)
class Sending:
    """Image with its requests. ``cancel`` may be called at any time."""

    sender: Sender
    subjects: tuple[Subject, ...]
    image: EncodedImage
    frame_size: tuple[int, int] | None
    sha256: str  # of the image
    cancel: Callable[[], None] = lambda: None
    is_cancelled: bool = False
    is_accepted: bool = False  # its sender was notified


@dataclass(slots=True, eq=False)
class _Open:
    """Request without a verdict. ``image``: None until it is read back from the journal."""

    subject: Subject
    image: ImageSource | None
    maker: Sending | None = None  # None: accepted by an earlier run
    content: bytes | None = None
    sha256: str | None = None
    waiting: list[Sending] = field(default_factory=list)
    is_wanted: bool = True  # restored from the journal without a sender, of an earlier run
    submission: Submission | None = None


class JournaledImages:
    """Journaled images of a line. Call ``take_up`` first; then for any thread."""

    def __init__(self, inspector: Inspector, verdicts: Verdicts, store: ResultStore, images: ImageKeeper) -> None:
        self._inspector = inspector
        self._verdicts = verdicts
        self._store = store
        self._images = images
        self._reader = JournalReader(store.path)
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()  # guards _open and its values
        self._reserved: dict[str, str] = {}
        self._reserving = threading.Lock()
        self.left_overs: tuple[LeftOver, ...] = ()

    @property
    def unfinished(self) -> int:
        return len(self._open)

    def take_up(self) -> None:
        """Read the unfinished requests of an earlier run: ``left_overs``, oldest first."""
        by_image: dict[int, list[Subject]] = {}
        for each in self._reader.unfinished():
            by_image.setdefault(each.image, []).append(each.subject)
            self._open[each.subject.key] = _Open(each.subject, None)
        self.left_overs = tuple(LeftOver(number, tuple(subjects)) for number, subjects in by_image.items())
        if self._open:
            log.warning("journal_taken_up requests=%d: accepted by an earlier run, and not judged", len(self._open))

    def image_bytes(self, number: int) -> bytes | None:
        """Image of a left-over; None if it has ended. Raises sqlite3.Error and OSError."""
        return self._reader.content(number)

    def resume(
        self, sender: Sender, subjects: Sequence[Subject], image: EncodedImage, frame_size: tuple[int, int] | None
    ) -> None:
        """Judge a left-over, whose requests are journaled already."""
        sending = _sending(sender, subjects, image, frame_size)
        frame = Frame(image, frame_size)
        keys = [subject.key for subject in subjects]
        whole = "it" if subjects[0].box is None else "its frame"
        reason = self._inspector.reason_to_spare(keys, whole)
        for subject in subjects:
            with self._lock:
                request = self._open.setdefault(subject.key, _Open(subject, None))
                request.image, request.content = source_of(request.subject, image, frame), image.content
                request.sha256 = sending.sha256
                request.waiting.append(sending)
            self._submit(request, reason)

    def accept(
        self,
        sender: Sender,
        subjects: Sequence[Subject],
        image: EncodedImage,
        frame_size: tuple[int, int] | None = None,
    ) -> Sending:
        """Journal and judge the requests of one image; does not wait. ``frame_size``: (height, width) of the layout."""
        sending = _sending(sender, subjects, image, frame_size)
        sending.cancel = lambda: self._cancel(sending)
        self._journal(sending, sending.subjects)
        return sending

    def reserve_key(self, key: str, asked: str) -> bool:
        """Reserve a key until ``release_key``; False: an equal request had it. Raises OrderRefused for another."""
        with self._reserving:
            try:
                known = {self._reserved[key]} if key in self._reserved else self._reader.asked(key)
            except (sqlite3.Error, OSError) as error:
                reason = f"whether key {key!r} was given before cannot be read ({error})"
                raise OrderRefused(Reason.NOT_NOW, reason, REREAD_S) from error
            if known - {asked}:
                raise key_reused(key)
            if not known:
                self._reserved[key] = asked
            return not known

    def release_key(self, key: str) -> None:
        """Release a key once its request is durable, or if none was sent."""
        self._reserved.pop(key, None)

    def _journal(self, sending: Sending, subjects: Sequence[Subject]) -> None:
        self._store.accept(subjects, sending.image.content, lambda answers: self._accepted(sending, subjects, answers))

    # -- accepted: on the store's thread --

    def _accepted(self, sending: Sending, subjects: Sequence[Subject], answers: Sequence[Acceptance]) -> None:
        if Acceptance.REUSED in answers:
            _send(sending, None)
            return
        is_cut = any(subject.box is not None for subject in sending.subjects)
        frame = Frame(sending.image, sending.frame_size) if is_cut else None
        new, judged = [], []
        with self._lock:
            waiting = [] if sending.is_cancelled else [sending]
            for subject, answer in zip(subjects, answers, strict=True):
                if answer is Acceptance.JUDGED:
                    judged.append(subject)
                elif answer is Acceptance.UNDER_WAY and subject.key in self._open:
                    self._open[subject.key].waiting += waiting
                else:
                    source, content = source_of(subject, sending.image, frame), sending.image.content
                    maker = sending if answer is Acceptance.NEW else None
                    request = _Open(subject, source, maker, content, sending.sha256, list(waiting), is_wanted=False)
                    self._open[subject.key] = request
                    new.append(request)
        if not sending.is_accepted:
            sending.is_accepted = True
            sending.sender.accepted()
        for request in new:
            key, box = request.subject.key, request.subject.box
            self._submit(request, self._inspector.reason_to_spare([key], "it" if box is None else "its frame"))
        for subject in judged:
            self._send_known(sending, subject)

    def _send_known(self, sending: Sending, subject: Subject) -> None:
        try:
            known = self._store.find_with_maps(subject.key)
        except (sqlite3.Error, OSError) as error:  # perhaps transient: read again after the next commit
            log.warning("results_not_read key=%s reason=%s: tried again", subject.key, error)
            self._store.write(lambda _: None, lambda _: self._send_known(sending, subject))
            return
        if known is None:  # the row was removed meanwhile, with the file or by its age
            self._journal(sending, (subject,))
        elif subject.asked_sha256 not in (None, known.subject.asked_sha256):  # stored since, in a new file
            _send(sending, None)
        else:
            _send(sending, StoredVerdict(known, UNJUDGED, is_repeat=True))

    def _submit(self, request: _Open, reason: str | None) -> None:
        """Submit a request. ``reason``: end it UNKNOWN without judging."""
        subject = request.subject
        if reason is not None:
            self._keep_and_commit(request, unknown(f"{subject.name}: {reason}"), UNJUDGED)
            return
        assert request.image is not None
        ended = partial(self._request_judged, request)
        request.submission = Submission(subject, request.image, ended)
        with self._lock:
            is_unwanted = not (request.waiting or request.is_wanted)
        if is_unwanted:  # cancelled before submission: it does not run
            self._inspector.cancel_subject(request.submission)
        self._inspector.submit_subject(request.submission)

    # -- cancelled: on any thread --

    def _cancel(self, sending: Sending) -> None:
        with self._lock:
            sending.is_cancelled = True
            mine = [self._open[each.key] for each in sending.subjects if each.key in self._open]
            unwanted = []
            for request in mine:
                if sending in request.waiting:
                    request.waiting.remove(sending)
                    if not (request.waiting or request.is_wanted):
                        unwanted.append(request)
        for request in unwanted:
            if request.submission is not None:
                self._inspector.cancel_subject(request.submission)

    # -- judged: on the agent's thread, then on the store's --

    def _request_judged(self, request: _Open, outcome: Outcome, course: Course) -> None:
        if outcome.reason == CANCELLED:
            self._store.withdraw([request.subject.key], lambda _: self._request_withdrawn(request))
        else:
            self._keep_and_commit(request, outcome, course)

    def _request_withdrawn(self, request: _Open) -> None:
        """A request was withdrawn; accept it again for senders that arrived meanwhile."""
        with self._lock:
            self._close(request)
            waiting = list(request.waiting)
        self._inspector.forget_attempts(request.subject.key)
        for sending in waiting:
            self._journal(sending, (request.subject,))

    def _close(self, request: _Open) -> None:
        """Close a request; call under the lock. A new results file may have accepted the key again."""
        if self._open.get(request.subject.key) is request:
            del self._open[request.subject.key]

    def _keep_and_commit(self, request: _Open, outcome: Outcome, course: Course) -> None:
        """Store the image if such images are kept, then the verdict."""
        subject = request.subject
        result = judged_result(self._inspector.agent.config, subject, outcome, course, request.sha256)
        if request.content is not None and self._images.archive.wants(result.verdict):
            then = partial(self._commit_request, request, result, course)
            self._images.keep(request.content, subject.image, subject.arrived_at, then)
        else:
            self._commit_request(request, result, course, None)

    def _commit_request(self, request: _Open, result: Result, course: Course, kept_as: str | None) -> None:
        result = replace(result, kept_as=kept_as)
        stored = partial(self._request_committed, request, result, course)
        self._verdicts.commit_result(result, stored, is_urgent=bool(request.waiting))

    def _request_committed(self, request: _Open, result: Result, course: Course, recorded: Recorded) -> None:
        key = request.subject.key
        self._inspector.forget_attempts(key)
        with self._lock:
            self._close(request)
            waiting = list(request.waiting)
        if not recorded.is_new:  # judged under this key before: the stored verdict counts
            for sending in waiting:
                self._send_known(sending, request.subject)
            return
        stored = replace(result, seq=recorded.seq)
        for sending in waiting:
            _send(sending, StoredVerdict(stored, course, is_repeat=sending is not request.maker))


def _sending(
    sender: Sender, subjects: Sequence[Subject], image: EncodedImage, frame_size: tuple[int, int] | None
) -> Sending:
    return Sending(sender, tuple(subjects), image, frame_size, hashlib.sha256(image.content).hexdigest())


def key_reused(key: str) -> OrderRefused:
    given = key.partition(PART_MARK)[0]
    reason = f"key {given!r} was given for something else (image, part, board) - each inspection needs its own key"
    return OrderRefused(Reason.KEY_REUSED, reason)


def _send(sending: Sending, verdict: StoredVerdict | None) -> None:
    """Answer the senders. ``verdict`` None: the key belongs to another request."""
    try:
        if verdict is None:
            sending.sender.refused(sending.subjects[0].key)
        else:
            sending.sender.judged(verdict)
    except Exception:  # an error of one sender must not affect others
        log.exception("sender_failed key=%s", sending.subjects[0].key)


def source_of(subject: Subject, image: ImageSource, frame: Frame | None) -> ImageSource:
    if subject.box is None or frame is None:
        return image
    return FramePart(frame, subject.box, subject.name)
