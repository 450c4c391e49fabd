"""An engine that writes without a model: what the runtime makes of quanta can be told token by token."""

import threading

from experts.expert import Prediction
from experts.llm.serving.engine import Left, QuantumOutcome, TextEngineStatistics
from experts.llm.serving.generation import Ending, RefusedText, Token


def token(expert, position):
    """What an expert writes at a position of a text, its prompt counted."""
    return (sum(expert.encode()) + position) % 97


class FakeTextEngine:
    """Writes ``pace`` tokens of each request in a quantum; a router answers with the first label of its choices.

    ``log``: what was asked of it, in order. ``gate``: where one is set, each quantum waits to be let through.
    """

    def __init__(self, pace=2):
        self.pace = pace
        self.log = []
        self.held = {}  # request -> tokens, of those that have begun
        self.texts = {}  # request -> text, and what was written of it
        self.errors = []  # raised by the next quanta, one each
        self.lacking = ()  # whom it tells to have found no room for
        self.gate = None
        self.entered = threading.Semaphore(0)
        self.read = self.written = 0
        self.leases = []  # of each turn
        self.lengths = None  # by which it tells what is left; None: as much as may be written

    def run(self, turns, quantum_s):
        self.log.append(("run", tuple(turn.request for turn in turns)))
        self.entered.release()
        if self.gate is not None:
            assert self.gate.acquire(timeout=60)
        if self.errors:
            raise self.errors.pop(0)
        finished, unfinished = [], []
        for turn in turns:
            ended = self._further(turn)
            if ended is None:
                unfinished.append((turn.request, self._left(turn)))
            else:
                finished.append((turn.request, ended))
                self.forget(turn.request)
        return QuantumOutcome(tuple(finished), tuple(unfinished), self.lacking)

    def forget(self, request):
        self.log.append(("forget", request))
        self.held.pop(request, None)
        self.texts.pop(request, None)

    def preempt(self, request):
        self.log.append(("preempt", request))
        self.held.pop(request, None)

    def hurry(self):
        self.log.append(("hurry",))

    def statistics(self):
        return TextEngineStatistics(read_tokens=self.read, written_tokens=self.written)

    def _further(self, turn):
        self.leases.append(turn.lease)
        generation = turn.text.generation
        text, written = self.texts.setdefault(turn.request, (turn.text, []))
        assert text is turn.text, "a text is one object for as long as it is written"
        if generation.choices is not None:
            return Prediction(next(iter(generation.choices)), 0.75)
        there = len(generation.prompt) + len(written)
        self.read += there - self.held.get(turn.request, 0)
        for _ in range(self.pace):
            if len(generation.prompt) + len(written) >= turn.lease:
                break
            written.append(token(turn.expert, len(generation.prompt) + len(written)))
            self.written += 1
            try:
                is_over = turn.text.writer.write(Token(written[-1], -0.5))
            except Exception as error:  # noqa: BLE001 - whatever a test's writer raises
                return RefusedText(f"its reader failed: {error}")
            if is_over:
                return Prediction(Ending.STOP, 1.0)
            if len(written) == generation.most_new_tokens:
                return Prediction(Ending.LENGTH, 1.0)
        self.held[turn.request] = len(generation.prompt) + len(written)
        return None

    def _left(self, turn):
        generation, written = turn.text.generation, len(self.texts[turn.request][1])
        there, held = len(generation.prompt) + written, self.held[turn.request]
        output = generation.most_tokens - there
        if self.lengths is not None:
            output = self.lengths.left(turn.expert, written, generation.most_new_tokens)
        return Left(there - held, output, generation.most_tokens, held)
