"""The desk that every API calls: requests to a line, and the values of orders and answers.

Guarantees: no call blocks on an expert, or on the disk for longer than a short read. Every accepted order gets exactly
one end, unless it is cancelled. A kept order is durable before it is reported as accepted, and stored before it is
reported as judged. A refusal is immediate and leaves no state. Any thread may call; listeners are called on the desk's
threads and return at once.
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

    from agent.faults.errors import OrderRefused
    from agent.subject import SourceStatus, Subject
    from experts.expert import BoundingBox, LabelScore, Verdict
    from experts.llm.serving.generation import Ending, Piece
    from experts.llm.text.constraints import Constraint
    from experts.llm.text.tool_calls import ToolUse


@dataclass(frozen=True, slots=True, eq=False)
class ImageOrder:
    """Image to judge: a part, or without component and expert a whole board, cut by its layout.

    ``image``: an encoded file, or pixels (height, width, 3) uint8 RGB. The subject's key is the caller's idempotency
    key, or empty: an order with the key of another gets the same end, and is refused if its content differs.
    ``is_kept``: the image is journaled, stored, and counts on its board; otherwise no record remains.
    ``wants_maps``: answers include anomaly maps, if kept.
    """

    subject: Subject
    image: bytes | NDArray[np.uint8]
    is_kept: bool = True
    wants_maps: bool = False


@dataclass(frozen=True, slots=True)
class AnomalyView:
    """Measurement of an anomaly expert. ``map_png``: anomaly map as a picture (``experts.thresholds.map_pictures``);
    None if not requested, not given by the model, or not kept, and for an image without anomaly."""

    expert: str
    score: float
    threshold: float
    map_png: bytes | None = None


@dataclass(frozen=True, slots=True)
class VerdictView:
    """Verdict of one subject. ``seq``: number of its row; None if not kept. ``queue_s``: before the first batch;
    ``compute_s``: in batches; ``seconds``: from arrival to verdict. ``is_repeat``: from an earlier order of its key."""

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

    def findings(self) -> dict[str, object]:
        """Findings of experts, as JSON; maps are left out."""
        return {
            "boxes": [box.as_json() for box in self.boxes],
            "anomalies": [{"expert": a.expert, "score": a.score, "threshold": a.threshold} for a in self.anomalies],
            "outputs": [output.as_json() for output in self.outputs],
        }


class Listener(Protocol):
    """Caller of an order."""

    def accepted(self) -> None:
        """The order is durable and will be judged. Called for kept orders, at most once."""

    def judged(self, parts: Sequence[VerdictView]) -> None:
        """End with the verdict of one part, or of each part of a board. A kept order is stored by now."""

    def refused(self, refusal: OrderRefused) -> None:
        """End of an order whose key belongs to another one: no part is judged."""


class CallerTicket(Protocol):
    """An order under way."""

    def cancel(self) -> None:
        """Withdraw parts that have not begun; running parts are finished, and stored if the order is kept. No further
        call of the listener. Idempotent."""


@dataclass(frozen=True, slots=True)
class TextOrder:
    """Text to write: a prompt's continuation, or the next message of a chat. Not stored.

    ``model``: an expert of texts, a route of texts, or AUTO. ``prompt``: text, or the expert's tokens.
    ``messages``: with role and content, for the chat template; ``template``: its arguments. ``most_tokens``: None for
    as many as context and memory have room for. ``given``: sampling fields that the caller set; the model's
    defaults replace the others. ``stop``: strings that end the text before them. ``deadline_s``: from now on; the text
    written so far is the answer. ``constraint``: form of the answer. ``tools``: functions that it may call. ``echoes``:
    the prompt is shown first, with log-probabilities as ``sampling`` asks. ``pools``: no text, but the prompt's vector.
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
    constraint: Constraint | None = None
    tools: ToolUse | None = None
    echoes: bool = False
    pools: bool = False


AUTO = "auto"  # the only model, or the route of this name


@dataclass(frozen=True, slots=True)
class TextEnd:
    """End of a text. ``ending``: None after a ``failure``. ``expert``: the writer; None if none had begun. ``queue_s``:
    until it began; ``first_token_s``: until the first output. ``label``, ``score``: of a labelling expert."""

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


TextEvent: TypeAlias = "Piece | TextEnd"


class TextListener(Protocol):
    """Caller of a text."""

    def wrote(self, piece: Piece) -> None:
        """Called on the computing thread: must return at once."""

    def ended(self, end: TextEnd) -> None:
        """Called once, after all pieces, unless the text was cancelled."""


class TextTicket(CallerTicket, Protocol):
    """Text under way. Cancelling releases its memory."""

    @property
    def due_s(self) -> float | None:
        """Deadline, by the monotonic clock; None: no deadline."""


@dataclass(frozen=True, slots=True)
class TextModelView:
    """Expert or route that writes texts. ``reason``: why it is not ready. ``context_tokens``: the smallest context.
    ``pooling``: how an expert makes a vector of a prompt; None: it makes none. ``parent``: of an adapter's expert, the
    expert of its base alone, if the line has one."""

    name: str
    experts: tuple[str, ...]
    context_tokens: int | None
    is_ready: bool
    reason: str | None = None
    pooling: str | None = None
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt's tokens, and the context of the expert that they are for."""

    expert: str
    tokens: tuple[int, ...]
    context_tokens: int


@dataclass(frozen=True, slots=True)
class ModelView:
    """Component's route, or one expert. ``reason``: why it is not ready."""

    name: str
    experts: tuple[str, ...]
    labels: tuple[str, ...]
    input_px: tuple[int, int] | None  # (height, width) of its first expert's input
    max_batch: int
    is_ready: bool
    reason: str | None = None
    measures_anomalies: bool = False


@dataclass(frozen=True, slots=True)
class BoardView:
    """Board in its current state. ``verdict``, ``closed_at``: None while open. ``missing``: component -> images.
    ``reason``: why a closed board is not OK, besides its parts."""

    serial: str
    board_type: str
    verdict: Verdict | None
    opened_at: datetime
    closed_at: datetime | None
    missing: Mapping[str, int]
    counts: Mapping[Verdict, int]
    parts: tuple[VerdictView, ...] = ()
    is_revision: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ResultsCursor:
    """Position in a results file: its identity, and the numbers of a result and of a change of a board's verdict.
    ``file``: None before the first read; ``seq``, ``board``: None for future rows only."""

    file: str | None = None
    seq: int | None = None
    board: int | None = None


@dataclass(frozen=True, slots=True)
class StoredView:
    """Results and numbered changes of boards after a cursor. ``end``: cursor after the last stored row."""

    end: ResultsCursor
    results: tuple[VerdictView, ...] = ()
    boards: tuple[tuple[int, BoardView], ...] = ()


Event: TypeAlias = "VerdictView | BoardView"  # a result that was just stored, or a board's verdict


@dataclass(frozen=True, slots=True)
class QueueView:
    """Queue of one executor. ``running``: expert of its batch; None while idle. ``busy_s``: seconds of work since
    the start; ``waited_s``: of these, waits for decoded images."""

    executor: int
    processor: str
    requests: int
    running: str | None
    busy_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolView:
    """Memory and its budget. ``lease_bytes``: reserved by texts under way, in addition to experts."""

    name: str
    used_bytes: int
    capacity_bytes: int
    experts: tuple[str, ...]
    lease_bytes: int = 0
    lease_capacity_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TextsView:
    """Texts since the start. ``shown``: texts with output; ``first_token_s``: the sum over these."""

    under_way: int = 0
    ended: int = 0
    read_tokens: int = 0
    written_tokens: int = 0
    shown: int = 0
    first_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ShadowsView:
    """Images for shadows, now and since the start. ``dropped``: for lack of time or room."""

    waiting: int = 0
    running: int = 0
    ran: int = 0
    failed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """``timeline``: course of a request, values for JSON (docs/results.md); None for other subjects, or if unknown."""

    subject: str
    sentences: list[str]
    timeline: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StatusView:
    """Snapshot of the agent. ``standing``: expert -> reason to take no requests now; ``unproven``:
    expert -> what its proof lacks; ``advice``: changes that would make a sound line faster."""

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
    unproven: Mapping[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReloadView:
    """Result of a reload. ``problems``: why nothing has changed. ``needs_restart``: keys that take effect only at
    the next start."""

    is_applied: bool
    problems: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()


class Desk(Protocol):
    """Orders and queries of a line. Refusals raise OrderRefused with its ``reason``."""

    def order(self, order: ImageOrder, listener: Listener) -> CallerTicket: ...

    def generate(self, order: TextOrder, listener: TextListener) -> TextTicket: ...

    def text_models(self) -> Sequence[TextModelView]: ...

    def tokenised(self, order: TextOrder) -> PromptView:
        """An order's prompt as the first expert that it reaches would read it. Raises as ``generate``."""

    def detokenised(self, model: str, tokens: tuple[int, ...]) -> str: ...

    def unready(self) -> str | None:
        """Why no work is taken now, or None."""

    def models(self) -> Sequence[ModelView]:
        """Routes by their component's name, and experts as `expert:ID`."""

    def load(self, model: str) -> None:
        """Load a model's experts into room that no request needs sooner. Does not wait."""

    def unload(self, model: str) -> None:
        """Evict a model's experts, unless they are in use."""

    def boards(self, serial: str, board_type: str | None = None) -> Sequence[BoardView]:
        """Latest run of the board of each type with this serial."""

    def stored_after(self, seq: int, board: int, limit: int, *, with_maps: bool = False) -> StoredView:
        """At most ``limit`` stored results with larger numbers; if fewer remain, as many changes of boards."""

    def subscribe(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Call ``notify`` after each stored result or board's verdict. Returns a function to unsubscribe."""

    def trigger(
        self, camera: str, board: str | None = None, board_type: str | None = None, key: str | None = None
    ) -> str:
        """Trigger a frame of a triggered camera. Returns the prefix of its results' keys. ``key``: the caller's
        idempotency key: an equal trigger takes no further frame, another one is refused."""

    def status(self) -> StatusView: ...

    def explanation(self, subject: str) -> Explanation:
        """Why: of an expert (by id), a component, a result (by key or number), or a request under way (by key)."""

    def reload(self) -> ReloadView:
        """Read the line file again and apply it. Takes as long as packing the new experts."""
