"""The desk that every API calls: requests to a line, and the nouns of question and answer.

Guarantees: no call blocks on an expert, or on the disk for longer than a short read. Every accepted order gets exactly
one end, unless it is cancelled. A kept order is durable before it is told to be accepted, and stored before it is told
to be judged. A refusal comes at once and leaves nothing behind. Any thread may call; listeners are called on the
desk's threads and return at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from experts.llm.serving.generation import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    import numpy as np
    from numpy.typing import NDArray

    from agent.subject import SourceStatus, Subject
    from experts.errors import OrderRefused
    from experts.expert import BoundingBox, LabelScore, Verdict
    from experts.llm.serving.generation import Ending


@dataclass(frozen=True, slots=True, eq=False)
class ImageOrder:
    """Image to be judged. A subject with neither component nor expert is a frame of a whole board, which the layout
    of its type cuts.

    ``image``: an encoded file, or pixels (height, width, 3) uint8 RGB. The subject's key is the caller's idempotency
    key, or empty. A kept order whose key has a verdict gets that verdict; one whose key is under way waits for the same
    end; the same key for another content is refused. ``is_kept``: the image is journaled, stored, and counts on its
    board; otherwise nothing remains. ``wants_maps``: answers come with pictures of the anomalies, as far as kept.
    """

    subject: Subject
    image: bytes | NDArray[np.uint8]
    is_kept: bool = True
    wants_maps: bool = False


@dataclass(frozen=True, slots=True)
class AnomalyView:
    """Measurement of an anomaly expert. ``map_png``: a small picture of where, see ``experts.thresholds.map_pictures``.

    None where it was not asked for, the image is not anomalous, its model gives none, or it was not kept.
    """

    expert: str
    score: float
    threshold: float
    map_png: bytes | None = None


@dataclass(frozen=True, slots=True)
class VerdictView:
    """The verdict of one subject. ``seq``: its row's number; None where it is not kept.

    ``queue_s``: before the first batch; ``compute_s``: in batches; ``seconds``: from arrival to verdict.
    ``is_repeat``: judged for an earlier order of the same key.
    """

    subject: Subject
    verdict: Verdict
    seq: int | None = None
    label: str | None = None
    score: float | None = None
    reason: str | None = None
    experts: tuple[str, ...] = ()
    boxes: tuple[BoundingBox, ...] = ()
    finished_at: datetime | None = None
    seconds: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    anomalies: tuple[AnomalyView, ...] = ()
    is_repeat: bool = False
    outputs: tuple[LabelScore, ...] = ()


class Listener(Protocol):
    """Caller of an order."""

    def accepted(self) -> None:
        """The order is durable: it will be judged. Called for kept orders, at most once."""

    def judged(self, parts: Sequence[VerdictView]) -> None:
        """The end: one part, or each of a frame's. Stored by now, if the order is kept."""

    def refused(self, refusal: OrderRefused) -> None:
        """The end of an order whose key was given for another one: nothing of it is judged."""


class CallerTicket(Protocol):
    """An order under way."""

    def cancel(self) -> None:
        """The caller does not wait any more: what has not begun is withdrawn, as if it had never come; what runs is
        finished, and stored if it is kept. The listener hears nothing more. May be called at any time, and again."""


@dataclass(frozen=True, slots=True)
class TextOrder:
    """Text to be written: a prompt's continuation, or the next message of a chat; one of the two is given.

    ``model``: an expert that takes texts, a route of texts, or AUTO. ``prompt``: words, or the expert's tokens.
    ``messages``: with role and content, as the chat template wants them. ``most_tokens``: None for as many as context
    and memory have room for. ``given``: sampling fields that the caller set to their defaults; the model's own defaults
    replace the others. ``template``: arguments of the chat template. ``stop``: strings that end the text before them.
    ``deadline_s``: from now on; the text so far stands. A text is not journaled, and nothing of it is stored.
    """

    model: str
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    most_tokens: int | None = None
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
    stop: tuple[str, ...] = ()
    deadline_s: float | None = None
    given: frozenset[str] = frozenset()
    template: Mapping[str, Any] = field(default_factory=dict)


AUTO = "auto"  # the model that is the only one, or the route of this name


@dataclass(frozen=True, slots=True)
class TokenView:
    """Written token. ``content``: its bytes, perhaps a part of a character; ``text``: as shown.

    ``alternatives``: the likeliest tokens in its place, if they were asked for.
    """

    text: str
    content: bytes
    logprob: float
    alternatives: tuple[TokenView, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Part of a text. ``tokens``: its tokens, if their probabilities were asked for.

    ``is_thought``: the prompt itself opened the reasoning, so the text does not show its beginning.
    """

    expert: str
    text: str
    tokens: tuple[TokenView, ...] = ()
    is_thought: bool = False


@dataclass(frozen=True, slots=True)
class TextEnd:
    """End of a text. ``ending``: None where it failed, and ``failure`` says why.

    ``expert``: the writer; None where none had begun. ``label``, ``score``: of an expert that answers with
    labels. ``queue_s``: before it was begun; ``first_token_s``: until something was shown; ``seconds``: in all.
    """

    ending: Ending | None
    expert: str | None
    read_tokens: int
    written_tokens: int
    seconds: float
    queue_s: float = 0.0
    first_token_s: float | None = None
    label: str | None = None
    score: float | None = None
    failure: OrderRefused | None = None


TextEvent: TypeAlias = "TextPiece | TextEnd"


class TextListener(Protocol):
    """Caller of a text."""

    def wrote(self, piece: TextPiece) -> None:
        """A piece more. On the thread that computes: it returns at once."""

    def ended(self, end: TextEnd) -> None:
        """The end, once, behind all pieces; unless it was cancelled."""


class TextTicket(CallerTicket, Protocol):
    """A text under way; cancelled it is written no further, and the memory that it holds is given back."""

    @property
    def due_s(self) -> float | None:
        """When its time is over, by the monotonic clock; None: never."""


@dataclass(frozen=True, slots=True)
class TextModelView:
    """Model that writes texts: an expert, or a route. ``reason``: why it is not ready.

    ``context_tokens``: what is read and written together, of the expert that has the smallest context.
    """

    name: str
    experts: tuple[str, ...]
    context_tokens: int | None
    is_ready: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ModelView:
    """Something that can be asked: a component's route, or one expert. ``reason``: why it is not ready."""

    name: str
    experts: tuple[str, ...]
    labels: tuple[str, ...]
    input_px: tuple[int, int] | None  # (height, width) that its first expert sees
    max_batch: int
    is_ready: bool
    reason: str | None = None
    measures_anomalies: bool = False


@dataclass(frozen=True, slots=True)
class BoardView:
    """Board now. ``verdict`` and ``closed_at``: None while it is open. ``missing``: component -> images."""

    serial: str
    board_type: str
    verdict: Verdict | None
    opened_at: datetime
    closed_at: datetime | None
    missing: Mapping[str, int]
    counts: Mapping[Verdict, int]
    parts: tuple[VerdictView, ...] = ()
    is_revision: bool = False


@dataclass(frozen=True, slots=True)
class ResultsCursor:
    """Position in a results file, by its numbers of results and of changes of boards' verdicts.

    ``file``: its identity; None where nothing of it was read. ``seq``, ``board``: None for those to come only.
    """

    file: str | None = None
    seq: int | None = None
    board: int | None = None


@dataclass(frozen=True, slots=True)
class StoredView:
    """Results and boards behind a cursor. ``end``: behind all that is stored.

    ``boards``: changes with their numbers, each behind all results that it was reached by.
    """

    end: ResultsCursor
    results: tuple[VerdictView, ...] = ()
    boards: tuple[tuple[int, BoardView], ...] = ()


Event: TypeAlias = "VerdictView | BoardView"  # a result that was just stored, or a board's verdict


@dataclass(frozen=True, slots=True)
class QueueView:
    """Queue of one executor. ``running``: the expert of its batch; None while it is idle.

    ``busy_s``: how long the executor was at work since the start; ``waited_s``: of that, until images were decoded.
    """

    executor: int
    processor: str
    requests: int
    running: str | None
    busy_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolView:
    """Memory and its budget. ``lease_bytes``: reserved by texts under way, beside the experts."""

    name: str
    used_bytes: int
    capacity_bytes: int
    experts: tuple[str, ...]
    lease_bytes: int = 0
    lease_capacity_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TextsView:
    """Texts since the start. ``first_token_s``: of those that showed something, all together; so many are ``shown``."""

    under_way: int = 0
    ended: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    shown: int = 0
    first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ShadowsView:
    """Images for the shadows of experts: that wait or are shown now, and what became of the others since the start.

    ``dropped``: there was no time, or no room.
    """

    waiting: int = 0
    running: int = 0
    ran: int = 0
    failed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class StatusView:
    """A snapshot of the whole agent. ``standing``: expert -> why it is not asked at the moment."""

    line: str
    version: str
    uptime_s: float
    is_draining: bool
    requests_in_flight: int
    verdicts: Mapping[Verdict, int]
    boards_open: int
    switches: int
    loads: int
    evictions: int
    bytes_read: int
    queues: tuple[QueueView, ...] = ()
    pools: tuple[PoolView, ...] = ()
    sources: tuple[SourceStatus, ...] = ()
    standing: Mapping[str, str] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()
    texts: TextsView = TextsView()
    shadows: ShadowsView = ShadowsView()


@dataclass(frozen=True, slots=True)
class ReloadView:
    """Result of a reload. Not applied: ``problems`` says why, and nothing has changed.

    ``needs_restart``: keys of the line file that changed and take effect at the next start only.
    """

    is_applied: bool
    problems: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()


class Desk(Protocol):
    """Refusals raise OrderRefused with its ``reason``."""

    def order(self, order: ImageOrder, listener: Listener) -> CallerTicket:
        """Have an image judged."""

    def generate(self, order: TextOrder, listener: TextListener) -> TextTicket:
        """Have a text written."""

    def text_models(self) -> Sequence[TextModelView]:
        """Routes and experts that write texts."""

    def models(self) -> Sequence[ModelView]:
        """Routes by their component's name, and experts as `expert:ID`."""

    def load(self, model: str) -> None:
        """Bring a model's experts into memory, now if there is room that no request needs sooner; does not wait."""

    def unload(self, model: str) -> None:
        """Let a model's experts go from memory, unless they are in use; they come back when they are asked."""

    def boards(self, serial: str, board_type: str | None = None) -> Sequence[BoardView]:
        """The latest run of the board of each type with this serial; empty where none is known."""

    def stored_after(self, seq: int, board: int, limit: int, *, with_maps: bool = False) -> StoredView:
        """Stored results with larger numbers, so many; where these are all, as many changes of boards' verdicts."""

    def subscribe(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Have it told that a result or a board's verdict was stored; call what is returned to end."""

    def trigger(
        self, camera: str, board: str | None = None, board_type: str | None = None, key: str | None = None
    ) -> str:
        """Have a camera that waits for triggers take a frame; the key that its results begin with.

        ``key``: the caller's idempotency key; the same trigger again takes no frame, another one is refused.
        """

    def status(self) -> StatusView:
        """A snapshot."""

    def explain(self, subject: str) -> Sequence[str]:
        """Why something is as it is, in sentences: an expert's id, a component, or a result's key."""

    def reload(self) -> ReloadView:
        """Read the line file anew, and do as it says. Takes as long as new experts need to be packed."""
