"""The engine of one executor: texts of any models, run iteration by iteration within a quantum.

The engine has no thread and no policy: the agent's core decides turns and leases. Guarantees: a finished text leaves at
once, and its keys and values are freed. A quantum has at least one iteration, ends on time as far as measured times
predict, and answers each request once. On a CPU, a lone prompt is read in long passes while no other request comes;
such a pass is abandoned between two layers if one does, and its tokens are read again. A request's tokens do not depend
on its neighbours; a fault of its prompt, writer or expert ends only that request. A model's exception passes through,
and no text is lost.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING

from experts.errors import AddressesExceeded, MemoryExceeded, PromptInvalid
from experts.expert import Prediction
from experts.llm.arenas.key_values import KvLayout, Prefix
from experts.llm.serving.family import ModelFamily, families
from experts.llm.serving.generation import Ending, check_against
from experts.llm.serving.iteration import (
    GROWTH,
    LEAST_CHUNK_TOKENS,
    IterationLimits,
    IterationTimes,
    OutputLengths,
    drafts,
    plan,
)
from experts.llm.serving.outputs import Outputs
from experts.llm.serving.texts import RoutedText
from experts.llm.token_batch import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from experts.llm.arenas.key_values import KvArena
    from experts.llm.attention import BatchKeyValues, KeyValues
    from experts.llm.model import LanguageModel
    from experts.llm.serving.texts import RunningText

FORGOTTEN = "its caller no longer waits"
MOST_DRAFTED_TOGETHER = 32  # their logits take no more memory than the tensors of an iteration's prompts


class _Abandoned(Exception):
    """A request came during a long pass."""


@dataclass(slots=True)
class TextEngineStatistics:
    """Totals since the engine was made."""

    iterations: int = 0
    rows: int = 0
    read_tokens: int = 0  # of prompts, including tokens that were read again
    written_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these
    busy_s: float = 0.0
    tensor_s: float = 0.0  # of ``busy_s``: in the models and in sampling

    @property
    def overhead_s(self) -> float:
        return (self.busy_s - self.tensor_s) / self.iterations if self.iterations else 0.0


@dataclass(slots=True)
class _FamilyTexts:
    """Texts of a quantum whose models are a family."""

    family: ModelFamily
    layout: KvLayout
    times: IterationTimes
    writing: IterationTimes  # of iterations that read no prompt
    texts: list[RunningText] = field(default_factory=list)

    def going(self) -> list[RunningText]:
        """Texts that run now, once those whose beginning another one reads have got it, or it never comes."""
        for text in self.texts:
            if text.source is not None and not (text.source.has_room and text.source in self.texts):
                text.source = None
        able = (text for text in self.texts if text.result is None and text.has_room and text.source is None)
        return [text for text in able if text.next_tokens]


class _PassKeyValues:
    """KeyValues of one pass. Their reservations are timed, to separate them from tensor work.

    ``is_over``: asked before each layer, whether the pass is abandoned; None: the pass runs to its end.
    """

    def __init__(
        self, key_values: KeyValues, clock: Callable[[], float], is_over: Callable[[], bool] | None = None
    ) -> None:
        self._key_values = key_values
        self._clock = clock
        self._is_over = is_over
        self.reserving_s = 0.0

    def holds(self, sequence: int) -> bool:
        return self._key_values.holds(sequence)

    def reserve(self, batch: TokenBatch) -> BatchKeyValues:
        began_s = self._clock()
        reserved = self._key_values.reserve(batch)
        self.reserving_s += self._clock() - began_s
        return reserved if self._is_over is None else _AbandonedByLayer(reserved, self._is_over)


class _AbandonedByLayer:
    """BatchKeyValues that raise _Abandoned at the layer before which the pass is over."""

    def __init__(self, reserved: BatchKeyValues, is_over: Callable[[], bool]) -> None:
        self._reserved = reserved
        self._is_over = is_over
        self.decode_layouts = reserved.decode_layouts
        self.sequences = None  # every layer asks
        self.prefill, self.decode = reserved.prefill, reserved.decode

    def attended(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        if self._is_over():
            raise _Abandoned
        return self._reserved.attended(layer, queries, keys, values)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self._is_over():
            raise _Abandoned
        self._reserved.append(layer, keys, values)


class LlmEngine:
    """Texts of one executor. One thread at a time calls ``run``."""

    def __init__(
        self, arena: KvArena, limits: IterationLimits | None = None, clock: Callable[[], float] = time.monotonic,
        lengths: OutputLengths | None = None,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._limits = limits or IterationLimits()
        self._clock = clock
        self._lengths = lengths or OutputLengths()
        self._texts: dict[int, RunningText] = {}
        self._times: dict[tuple[object, ...], tuple[IterationTimes, IterationTimes]] = {}
        self._running = Lock()
        self._ends_quantum = False
        self._calm_s = math.inf  # passes that may be abandoned are no longer: half of the last one that was
        self._requested: deque[tuple[int, bool]] = deque()  # requests to give back, and whether to forget them
        self._tally = TextEngineStatistics()
        self._arrivals = 0

    def run(
        self,
        texts: Sequence[RunningText],
        models: Sequence[LanguageModel],
        quantum_s: float,
        undisturbed_s: float | None = None,
    ) -> list[int]:
        """Iterate until the quantum is over, a finished text leaves its row unused, or ``end_quantum`` was called.

        ``models``: of each text; may be new objects each time, of equal weights. ``undisturbed_s``: the quantum's
        length until ``end_quantum`` is called, or a text fills its lease. A text without a result continues in a later
        quantum. Returns those of them that had no room for their lease, and hold nothing.
        """
        with self._running:
            began_s = self._clock()
            groups = self._groups(texts, models)
            lacking = self._make_room(groups)
            is_first, until_s = True, began_s + max(quantum_s, undisturbed_s or 0.0)
            while groups and self._iterate_in_time(groups, until_s, quantum_s, is_first):
                is_first = False
                is_long = self._clock() - began_s >= quantum_s
                if self._ends_quantum or self._has_free_rows(groups) or (is_long and self._has_full_lease(groups)):
                    break
            self._ends_quantum = False
            self._take_leave(texts)
            self._tally.busy_s += self._clock() - began_s
        self._apply_requested_if_idle()
        return [text.request for text in lacking if text.result is None]

    def _has_free_rows(self, groups: Sequence[_FamilyTexts]) -> bool:
        """True once a text has finished and no other text can take its row: its answer is sent at once."""
        texts = [text for group in groups for text in group.texts]
        going = sum(text.result is None for text in texts)
        return going < min(len(texts), self._limits.rows)

    def _has_full_lease(self, groups: Sequence[_FamilyTexts]) -> bool:
        texts = (text for group in groups for text in group.texts)
        return any(text.result is None and text.has_room and not text.next_tokens for text in texts)

    def end_quantum(self) -> None:
        """End this quantum, or else the next, after an iteration or amid a long one: a request waits.

        Any thread may call it.
        """
        self._ends_quantum = True

    def forget(self, request: int) -> None:
        """Drop an abandoned or answered request, with its keys and values. Idempotent; any thread may call it."""
        self._requested.append((request, True))
        self._apply_requested_if_idle()

    def preempt(self, request: int) -> None:
        """Free a request's keys and values; its tokens are read again later. Any thread may call it."""
        self._requested.append((request, False))
        self._apply_requested_if_idle()

    def lose_all(self) -> None:
        """Free all keys and values: their memory is lost. Any thread may call it, between two quanta."""
        for request in tuple(self._texts):
            self.preempt(request)

    def statistics(self) -> TextEngineStatistics:
        """Totals as of the last whole quantum."""
        return replace(self._tally)

    def _groups(self, texts: Sequence[RunningText], models: Sequence[LanguageModel]) -> list[_FamilyTexts]:
        places: dict[int, tuple[_FamilyTexts, int]] = {}
        groups = []
        for family in families({id(model): model for model in models}.values()):
            first = family.models[0]
            layout = KvLayout.of(first.spec, first.dtype)
            kind = (type(first), first.spec, first.dtype, first.device, len(family.models))
            times = self._times.setdefault(kind, (IterationTimes(), IterationTimes()))
            groups.append(_FamilyTexts(family, layout, *times))
            places.update({id(own): (groups[-1], place) for place, own in enumerate(family.models)})
        for text, model in zip(texts, models, strict=True):
            if self._texts.get(text.request) is not text:
                self._enter(text, model)
            if text.result is None:
                group, text.owner = places[id(model)]
                group.texts.append(text)
        return groups

    def _enter(self, text: RunningText, model: LanguageModel) -> None:
        self._drop(text.request)  # at the step before of its route
        self._arrivals += 1
        text.arrival, text.ran = self._arrivals, 0
        self._texts[text.request] = text
        try:
            check_against(text.asked, model.spec)
        except PromptInvalid as error:
            text.refuse(f"expert {text.expert}: {error}")

    def _make_room(self, groups: Iterable[_FamilyTexts]) -> list[RunningText]:
        """Reserve keys and values for each text's lease; returns the texts without room."""
        lacking = []
        for text, layout in [(text, group.layout) for group in groups for text in group.texts]:
            leased = text.leased
            if text.has_room and text.promised >= leased:
                continue
            try:
                if text.has_room:
                    self._arena.grow(text.request, leased)
                else:
                    prefix = self._prefix(text, text.spared)
                    text.lost(self._arena.begin(text.request, layout, leased, prefix))
                    text.source = self._source(text)
                    text.has_room = True
                text.promised = leased
            except AddressesExceeded as error:  # waiting for other texts brings none
                text.refuse(f"expert {text.expert}: {error}")
            except MemoryExceeded as error:
                if not text.has_room:
                    lacking.append(text)
                if error.wanted_bytes > self._arena.budget_bytes:
                    text.refuse(f"expert {text.expert}: {text.most_tokens} tokens are more than there is room for")
        return lacking

    def _source(self, text: RunningText) -> RunningText | None:
        """A text under way that reads, or has read, what this one begins with."""
        if text.weights is None or not self._arena.keeps_prefixes:
            return None
        others = (one for one in self._texts.values() if one.weights == text.weights and one.has_room)
        return next((one for one in others if one.source is None and text.common_with(one)), None)

    def _share(self, texts: Iterable[RunningText]) -> None:
        """Give what texts waited for to them, if it is there and sound."""
        for text in texts:
            source = text.source
            if source is None or not source.has_room or not source.is_sound or source.left_to_read:
                continue
            if common := text.common_with(source):
                self._arena.share(text.request, source.request, common)
                text.lost(common)
            text.source = None

    def _prefix(self, text: RunningText, end: int) -> Prefix | None:
        return None if text.weights is None else Prefix(text.weights, tuple(text.tokens[:end]))

    def _iterate_in_time(
        self, groups: Sequence[_FamilyTexts], until_s: float, quantum_s: float, is_first: bool
    ) -> bool:
        """Run an iteration of the group that has waited longest; False where no group or no time is left.

        It fits ``quantum_s``, or the time left if the text is alone.
        """
        self._apply_requested()
        now_s = self._clock()
        for group in groups:
            self._share(group.texts)  # of texts that had read it before
        for text in [text for each in groups for text in each.texts if text.result is None]:
            if text.asked.deadline_s is not None and now_s >= text.asked.deadline_s:
                text.end(Ending.DEADLINE)
                self._give_back(text)
        waiting = [(group, texts) for group in groups if (texts := group.going())]
        if not waiting:
            return False
        group, texts = min(waiting, key=lambda each: min(text.ran for text in each[1]))
        on_cpu = group.family.models[0].device.type == "cpu"  # a device is handed all layers at once
        is_lone = on_cpu and sum(len(own) for _, own in waiting) == 1
        deadline_s = texts[0].asked.deadline_s
        long_s = self._calm_s if deadline_s is None else min(self._calm_s, deadline_s - now_s)
        pass_s = max(quantum_s, long_s) if is_lone else quantum_s
        picks = self._plan(group, texts, until_s - now_s, pass_s, is_first)
        rows = [text for text in texts if text.request in picks]
        if rows:
            drafted = self._drafts(group, rows, min(until_s - now_s, pass_s))
            for text in rows:
                text.take_part(picks[text.request], drafted.get(text.request, 0))
            rows.sort(key=lambda text: (text.part == 1, self._arena.place(text.request)))
            self._iterate(group, rows, quantum_s)
        return bool(rows)

    def _plan(
        self, group: _FamilyTexts, texts: Sequence[RunningText], left_s: float, pass_s: float, is_first: bool
    ) -> dict[int, int]:
        writing = min(sum(text.next_tokens == 1 for text in texts), self._limits.rows)
        room_s = min(left_s, pass_s)
        room = min(group.times.tokens_within(room_s) - writing, self._limits.tokens)
        least = min(LEAST_CHUNK_TOKENS, self._limits.tokens)
        if is_first or left_s > pass_s:
            room = max(room, min(group.times.least_tokens(room_s), self._limits.tokens))
        elif left_s <= 0 or group.times.seconds(max(writing, 1)) > left_s or (not writing and room < least):
            return {}
        return plan(texts, self._limits.rows, room)

    def _drafts(self, group: _FamilyTexts, rows: Sequence[RunningText], room_s: float) -> Mapping[int, int]:
        """Drafted tokens by request; none beside a prompt, whose tokens fill the time.

        A text that samples step by step would wait for a device at each step, and drafts nothing there.
        """
        on_cpu = group.family.models[0].device.type == "cpu"
        drafting = (text for text in rows if text.lookup.share and (on_cpu or not text.sampler.changes_logits))
        texts = {text.request: (text.lookup.share, text.most_drafted) for text in drafting}
        if not texts or any(text.next_tokens > 1 for text in rows):
            return {}
        room = min(group.writing.tokens_within(room_s) - len(rows), MOST_DRAFTED_TOGETHER)
        return drafts(len(rows), texts, group.writing, room)

    def _iterate(self, group: _FamilyTexts, rows: Sequence[RunningText], quantum_s: float) -> None:
        began_s = self._clock()
        batch = TokenBatch.of([text.chunk() for text in rows], group.family.models[0].device)
        outputs = Outputs(rows, batch, group.family)
        is_over = self._is_over(group.times, batch.count, quantum_s)
        try:
            self._forward(group, batch, rows, outputs, is_over)
        except _Abandoned:
            self._calm_s = (self._clock() - began_s) / GROWTH
            for text in rows:
                text.abandoned()
            return
        if is_over is not None:
            self._calm_s *= GROWTH
        self._tally.iterations += 1
        for text in outputs.tell():
            text.refuse(_not_finite(text))
        for text in rows:
            text.has_run(self._tally.iterations)
        for text in [text for text in rows if text.wanted]:
            self._take(text, outputs)
        self._share(group.texts)
        for text in rows:
            if text.result is not None:
                self._give_back(text)
        self._tally.rows += len(rows)
        self._tally.read_tokens += sum(text.part for text in rows if text.part > 1 and not text.draft)
        took_s = self._clock() - began_s
        group.times.ran(batch.count, took_s)
        if all(text.part == text.wanted for text in rows):
            group.writing.ran(batch.count, took_s)

    def _is_over(self, times: IterationTimes, tokens: int, quantum_s: float) -> Callable[[], bool] | None:
        """Whether a pass of so many tokens is abandoned, to be asked in it; None: it is short enough to end."""
        if tokens <= max(times.tokens_within(quantum_s), times.least_tokens(quantum_s)):
            return None
        ends_s = self._clock() + times.seconds(tokens)
        return lambda: self._ends_quantum and ends_s - self._clock() > quantum_s

    def _forward(
        self, group: _FamilyTexts, batch: TokenBatch, rows: Sequence[RunningText], outputs: Outputs,
        is_over: Callable[[], bool] | None,
    ) -> None:  # fmt: skip
        key_values = _PassKeyValues(self._arena.key_values(group.layout), self._clock, is_over)

        def pause() -> None:
            if is_over is not None and is_over():
                raise _Abandoned

        began_s = self._clock()
        try:
            outputs.compute(group.family.hidden(batch, key_values, [text.owner for text in rows]), pause)
            outputs.fetch()
        finally:
            self._tally.tensor_s += self._clock() - began_s - key_values.reserving_s

    def _take(self, text: RunningText, outputs: Outputs) -> None:
        """Pass a text what came out behind its tokens."""
        if isinstance(text, RoutedText):
            weights = outputs.weights(text)
            text.refuse(_not_finite(text)) if weights is None else text.weighs(weights)
            return
        self._write(text, outputs)
        if text.draft:
            self._tally.drafted_tokens += len(text.draft)
            if not outputs.is_sound(text):
                text.abandoned()
                self._give_back(text)

    def _write(self, text: RunningText, outputs: Outputs) -> None:
        """The text's next token, and further ones as long as they are its draft's."""
        step, is_right = 0, text.result is None  # else its reading was refused
        while is_right:
            token = outputs.token(text, step)
            if token is None:
                text.refuse(_not_finite(text))
                return
            text.follows(token)
            self._tally.written_tokens += 1
            is_right = text.accept(step)
            self._tally.accepted_tokens += is_right
            step += 1

    def _give_back(self, text: RunningText) -> None:
        """Release a text's keys and values: it has its result, or is preempted."""
        self._arena.release(text.request, self._prefix(text, text.held), is_sound=text.is_sound)
        text.has_room = False
        text.promised = 0
        text.lost()

    def _drop(self, request: int) -> None:
        text = self._texts.pop(request, None)
        if text is not None:
            self._give_back(text)

    def _apply_requested_if_idle(self) -> None:
        """Apply requested changes, unless a quantum runs: that applies them before its next iteration."""
        while self._requested and self._running.acquire(blocking=False):
            try:
                self._apply_requested()
            finally:
                self._running.release()

    def _apply_requested(self) -> None:
        while self._requested:
            request, is_forgotten = self._requested.popleft()
            text = self._texts.get(request)
            if text is None:
                continue
            if is_forgotten:
                text.refuse(FORGOTTEN)
                self._drop(request)
            else:
                self._give_back(text)

    def _take_leave(self, texts: Iterable[RunningText]) -> None:
        self._apply_requested()
        for text in texts:
            if text.result is None:
                continue
            is_whole = isinstance(text.result, Prediction) and text.result.label != Ending.DEADLINE
            if is_whole and text.asked.most_new_tokens and not isinstance(text, RoutedText):
                self._lengths.ended(text.expert, text.written)
            self._drop(text.request)


def _not_finite(text: RunningText) -> str:
    return (
        f"expert {text.expert} answered with NaN or infinity after {len(text.tokens)} tokens: "
        "its weights are damaged, or its precision is too low for it"
    )
