"""An engine that writes without a model: what the runtime makes of quanta can be told token by token."""

import threading

from experts.expert import Prediction
from experts.llm.serving.engine import FORGOTTEN, TextEngineStatistics
from experts.llm.serving.generation import Token


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
        self.texts = {}  # request -> text
        self.errors = []  # raised by the next quanta, one each
        self.lacking = ()  # whom it tells to have found no room for
        self.gate = None
        self.entered = threading.Semaphore(0)
        self.read = self.written = 0
        self.leases = []  # of each text and quantum

    def run(self, texts, models, quantum_s, undisturbed_s=None):
        self.log.append(("run", tuple(text.request for text in texts)))
        self.entered.release()
        if self.gate is not None:
            assert self.gate.acquire(timeout=60)
        if self.errors:
            raise self.errors.pop(0)
        for text in texts:
            self._further(text)
            if text.result is not None:
                self.forget(text.request)
        return self.lacking

    def forget(self, request):
        self.log.append(("forget", request))
        self.held.pop(request, None)
        text = self.texts.pop(request, None)
        if text is not None and text.result is None:
            text.refuse(FORGOTTEN)

    def preempt(self, request):
        self.log.append(("preempt", request))
        self.held.pop(request, None)

    def end_quantum(self):
        self.log.append(("end_quantum",))

    def statistics(self):
        return TextEngineStatistics(read_tokens=self.read, written_tokens=self.written)

    def _further(self, text):
        self.leases.append(text.lease)
        assert self.texts.setdefault(text.request, text) is text, "a text is one object for as long as it is written"
        if text.asked.choices is not None:
            text.result = Prediction(next(iter(text.asked.choices)), 0.75)
            return
        self.read += len(text.tokens) - self.held.get(text.request, 0)
        for _ in range(self.pace):
            if len(text.tokens) >= text.lease or text.result is not None:
                break
            self.written += 1
            text.follows(Token(token(text.expert, len(text.tokens)), -0.5))
        self.held[text.request] = text.held = len(text.tokens)
