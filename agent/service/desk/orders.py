"""Orders of the APIs' callers: admitted, journaled if kept, judged, answered (``agent.doors.desk``).

Guarantees: an order that is not kept is answered from memory; every admission is released.
"""

from __future__ import annotations

import hashlib
import io
import threading
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from PIL import Image

from agent.core.request import CANCELLED
from agent.faults.errors import OrderRefused, Reason
from agent.runtime.images.sources import EncodedImage, Frame
from agent.service.desk.views import verdict_view
from agent.service.inspections.inspector import Submission
from agent.service.inspections.journaled import key_reused, source_of
from agent.service.inspections.rows import judged_result, maps_of
from agent.subject import CALLER_PREFIX, Subject, asked_sha256, checked_name, pieces
from experts.errors import ImageError
from experts.images import DEFAULT_MAX_PIXELS, LARGEST_MAX_PIXELS, stored_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from agent.core.request import Outcome
    from agent.doors.desk import CallerTicket, ImageOrder, Listener, VerdictView
    from agent.line_file.boards import LayoutSections
    from agent.runtime.images.sources import ImageSource
    from agent.service.inspections.admission import Admission
    from agent.service.inspections.courses import Course
    from agent.service.inspections.inspector import Inspector
    from agent.service.inspections.journaled import JournaledImages, Sending, StoredVerdict


@dataclass(slots=True, eq=False)
class _Gathering:
    """Implements ``CallerTicket``; called once, when its last piece ends. ``leave`` releases pieces' admission."""

    listener: Listener
    order: ImageOrder
    wanted: tuple[str, ...]
    leave: Callable[[int], None]
    withdraw: Callable[[], None] = lambda: None
    parts: dict[str, VerdictView] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    is_accepted: bool = False

    def accepted(self) -> None:
        with self.lock:
            self.is_accepted = True
            was_over = self.is_over
        if was_over:
            self.leave(len(self.wanted))
        else:
            self.listener.accepted()

    def judged(self, verdict: StoredVerdict) -> None:
        course = verdict.course
        maps = verdict.result.maps if self.order.wants_maps else ()
        part = verdict_view(verdict.result, queue_s=course.queue_s, compute_s=course.compute_s, maps=maps)
        self.add(verdict.result.subject.key, replace(part, is_repeat=verdict.is_repeat))

    def refused(self, key: str) -> None:
        with self.lock:
            was_over, self.is_over = self.is_over, True
        self.leave(len(self.wanted))
        if not was_over:
            self.listener.refused(key_reused(key.removeprefix(CALLER_PREFIX)))

    def add(self, key: str, part: VerdictView) -> None:
        with self.lock:
            self.parts[key] = part
            is_last = len(self.parts) == len(self.wanted) and not self.is_over
            self.is_over = self.is_over or is_last
        self.leave(1)
        if is_last:
            self.listener.judged([self.parts[key] for key in self.wanted])

    def cancel(self) -> None:
        with self.lock:
            self.is_over = True
        self.withdraw()


class OrderTaker:
    """Takes orders. For any thread."""

    def __init__(self, inspector: Inspector, journaled: JournaledImages, admission: Admission) -> None:
        self._inspector = inspector
        self._journaled = journaled
        self._admission = admission

    def order(self, order: ImageOrder, listener: Listener) -> CallerTicket:
        if not self._inspector.takes:
            raise OrderRefused(Reason.STOPPING, "the agent is stopping - the next one will take it", 5.0)
        board_type = self._board_type(order)
        subject, layout = self._subject(order, board_type)
        size = None if layout is None else layout.size
        content = _encoded(order.image) if order.is_kept else None
        if content is not None and order.subject.key:
            subject = replace(subject, asked_sha256=_asked_sha256(subject, content, layout))
        parts = pieces(subject, layout)
        held = order.image if content is None else content
        size_bytes = len(held) if isinstance(held, bytes) else held.nbytes
        if size is not None:
            size_bytes += size[0] * size[1] * 3  # a frame stays decoded until its last part is judged
        leave = self._admission.enter(len(parts), size_bytes)
        gathering = _Gathering(listener, order, tuple(part.key for part in parts), leave)
        try:
            if content is not None:
                image = EncodedImage(content, subject.image, DEFAULT_MAX_PIXELS)
                sending = self._journaled.accept(gathering, parts, image, size)
                gathering.withdraw = partial(self._cancel_sending, gathering, sending)
            else:
                self._ask(gathering, parts, order, size)
        except BaseException:
            leave(len(parts))
            raise
        return gathering

    def _cancel_sending(self, gathering: _Gathering, sending: Sending) -> None:
        """Cancel, but keep the admission until the journal answers: else cancelled orders fill the memory."""
        sending.cancel()
        if gathering.is_accepted:
            gathering.leave(len(gathering.wanted))

    def _ask(
        self, gathering: _Gathering, parts: Sequence[Subject], order: ImageOrder, size: tuple[int, int] | None
    ) -> None:
        name = gathering.wanted[0]
        whole: ImageSource = (
            EncodedImage(order.image, name, DEFAULT_MAX_PIXELS) if isinstance(order.image, bytes) else order.image
        )
        frame = None if size is None else Frame(EncodedImage(_encoded(order.image), name, DEFAULT_MAX_PIXELS), size)
        submissions = [
            Submission(part, source_of(part, whole, frame), partial(self._answered, gathering, part)) for part in parts
        ]
        gathering.withdraw = partial(self._cancel_all, submissions)
        for submission in submissions:
            self._inspector.submit_subject(submission)

    def _cancel_all(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            self._inspector.cancel_subject(submission)

    def _answered(self, gathering: _Gathering, subject: Subject, outcome: Outcome, course: Course) -> None:
        self._inspector.forget_attempts(subject.key)
        if outcome.reason == CANCELLED:
            gathering.leave(1)
            return
        maps = maps_of(outcome) if gathering.order.wants_maps else ()
        result = judged_result(self._inspector.agent.config, subject, outcome, course)
        part = verdict_view(result, queue_s=course.queue_s, compute_s=course.compute_s, maps=maps)
        gathering.add(subject.key, part)

    def _subject(self, order: ImageOrder, board_type: str | None) -> tuple[Subject, LayoutSections | None]:
        """Subject of the order, and the layout for an image of a whole board. Raises OrderRefused."""
        asked = order.subject
        ref = checked_name(asked.ref, "ref")
        key = CALLER_PREFIX + (checked_name(asked.key, "key") or uuid.uuid4().hex)
        subject = replace(asked, key=key, image=key, board_type=board_type)
        catalog = self._inspector.agent.config.catalog
        if asked.component is not None and asked.expert is not None:
            raise OrderRefused(Reason.INVALID, "component and expert are both given - name one")
        if asked.component is not None:
            if asked.component not in catalog.components:
                raise OrderRefused(Reason.NOT_FOUND, f"no route for component {asked.component!r}")
            if board_type is not None and not ref:
                raise OrderRefused(Reason.INVALID, "an image of a board says which part it shows - give its ref")
            return subject, None
        if asked.expert is not None:
            if asked.expert not in catalog.experts:
                raise OrderRefused(Reason.NOT_FOUND, f"no expert {asked.expert!r}")
            if catalog.experts[asked.expert].takes_texts:
                raise OrderRefused(Reason.INVALID, f"{asked.expert} takes texts, not images")
            return replace(subject, board_type=None), None  # the answer of a single expert is not a board's verdict
        layout = self._inspector.agent.config.layouts.get(board_type or "")
        if layout is None:
            raise OrderRefused(
                Reason.INVALID,
                "what does the image show? - name a component or an expert, or a board of a type with a layout",
            )
        _check_size(order.image, layout)
        return subject, layout

    def _board_type(self, order: ImageOrder) -> str | None:
        """Type of an order's board; None if the line has no boards or the image belongs to none."""
        checked_name(order.subject.board, "board")
        types = self._inspector.agent.config.boards
        if order.subject.board_type is not None and order.subject.board_type not in types:
            known = f"the line has {', '.join(types)}" if types else "the line has none"
            raise OrderRefused(Reason.NOT_FOUND, f"no board type {order.subject.board_type!r} - {known}")
        if order.subject.board is None and (order.subject.component is not None or order.subject.expert is not None):
            return None
        if order.subject.board_type is None and len(types) > 1:
            raise OrderRefused(Reason.INVALID, f"which of {', '.join(types)} is the board? - give its type")
        return order.subject.board_type or next(iter(types), None)


def _asked_sha256(subject: Subject, content: bytes, layout: LayoutSections | None) -> str:
    """Digest of the order under a caller's key."""
    asked = [(part.component, part.expert, part.ref, part.box) for part in pieces(subject, layout)]
    return asked_sha256(hashlib.sha256(content).hexdigest(), subject.board, subject.board_type, asked)


def _encoded(image: bytes | np.ndarray) -> bytes:
    """Pixels as BMP, the cheapest format to write."""
    if isinstance(image, bytes):
        return image
    file = io.BytesIO()
    Image.fromarray(image).save(file, "BMP")
    return file.getvalue()


def _check_size(image: bytes | np.ndarray, layout: LayoutSections) -> None:
    """Raises OrderRefused for a frame of another size than the layout's. Decoding reports invalid images later."""
    if isinstance(image, bytes):
        try:
            size = stored_size(image, "the image", LARGEST_MAX_PIXELS)
        except ImageError:
            return
    else:
        size = (image.shape[0], image.shape[1])
    if size != layout.size:
        raise OrderRefused(
            Reason.INVALID,
            f"the frame is {size[1]} x {size[0]} pixels, and its board's layout is for "
            f"{layout.size[1]} x {layout.size[0]}",
        )
