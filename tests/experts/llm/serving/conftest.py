"""Texts for an engine: who writes them down, and a model that is none."""

import pytest
import torch

from experts.llm.arenas.blocks import BlockArena
from experts.llm.arenas.extents import ExtentArena
from experts.llm.files.config import parse_spec
from experts.llm.serving.engine import LlmEngine
from experts.llm.serving.generation import GREEDY, TextRequest
from experts.llm.serving.grammar import GrammarVocabulary
from experts.llm.serving.iteration import IterationLimits
from experts.llm.serving.texts import text_of
from experts.llm.text.constraints import constrained

ARENAS = (ExtentArena, BlockArena)
VOCABULARY = 250
BYTES = GrammarVocabulary(
    lambda: [bytes([token]) for token in range(VOCABULARY)], lambda text: list(text.encode()), (0,), (0,)
)


def byte_grammar(constraint):
    """A grammar of a model whose tokens are bytes, of which 0 ends a text."""
    return BYTES.compiled(*constrained(constraint, is_thought=False))


class Notes:
    """A writer that remembers. ``act``: called with the count of tokens; the text is over where it says so."""

    def __init__(self, act=lambda count: False):
        self.sampled, self._act = [], act

    @property
    def tokens(self):
        return [sampled.id for sampled in self.sampled]

    def write(self, sampled):
        self.sampled.append(sampled)
        return bool(self._act(len(self.sampled)))


class VirtualClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class CountingModel:
    """After token n comes n + 1, if all that came before is really kept; it takes the time that it says.

    Its keys and values are the tokens themselves, so what it answers shows whether they are still those it was given.
    """

    spec = parse_spec(
        {
            "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        },
        "counting",
    )  # fmt: skip
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, clock=None, base_s=0.0, token_s=0.0, step=1, broken_after=None, layers=1):
        self.batches, self.raises = [], None
        self._clock, self._base_s, self._token_s, self._step = clock, base_s, token_s, step
        self._broken_after = broken_after  # this token
        self._layers, self.before_layer = layers, lambda layer: None

    @property
    def parts(self):
        return (self,)

    def hidden(self, batch, key_values):
        if self.raises is not None:
            raise self.raises
        reserved = key_values.reserve(batch)
        self.batches.append([(row.sequence, row.count) for row in batch.rows])
        tokens = batch.token_ids.float()[:, None, None].expand(-1, 1, 8)
        for layer in range(self._layers):
            self.before_layer(layer)
            reserved.append(0, tokens, batch.positions.float()[:, None, None].expand(-1, 1, 8))
            if self._clock is not None:
                self._clock.now_s += (self._base_s + self._token_s * len(batch.token_ids)) / self._layers
        self._check(batch, reserved)
        return batch.token_ids.float()[:, None].expand(-1, 8)

    def _check(self, batch, reserved):
        for number, row in enumerate(batch.rows[: batch.prefill_count]):
            stored = reserved.prefill(0, number)
            assert stored.values[0, :, 0].tolist() == list(range(row.end)), "every position is kept"
        for number, layout in enumerate(reserved.decode_layouts):
            values = reserved.decode(0, number).values
            there = values[:, 0, :, 0] if layout.places is None else values[layout.places, 0, :, 0]
            rows = list(range(len(batch.decode_rows)))
            rows = rows[layout.rows] if isinstance(layout.rows, slice) else layout.rows.tolist()
            for place, row in enumerate(rows):
                end = batch.decode_rows[row].end
                assert there[place, :end].tolist() == list(range(end)), "every position is kept"

    def logits(self, hidden):
        following = (hidden[:, 0].long() + self._step) % VOCABULARY
        logits = torch.zeros(len(hidden), VOCABULARY)
        logits[torch.arange(len(hidden)), following] = 8.0
        if self._broken_after is not None:
            logits[hidden[:, 0] == self._broken_after] = float("nan")
        return logits


class Desk:
    """An engine, and texts that are asked of it until they are done."""

    def __init__(self, model=None, arena=None, limits=None, **costs):
        self.clock = VirtualClock()
        self.model = model or CountingModel(self.clock, **costs)
        self.arena = arena or ExtentArena(4 * 2**20)
        self.engine = LlmEngine(self.arena, limits or IterationLimits(), self.clock)
        self.notes, self.texts, self.models, self.finished = {}, {}, {}, {}

    def ask(self, request, prompt, new=5, *, model=None, expert="counting", notes=None, deadline_s=None, weights=None,
            sampling=GREEDY, **options):  # fmt: skip
        self.notes[request] = notes or Notes()
        asked = TextRequest(tuple(prompt), new, sampling, self.notes[request], deadline_s, **options)
        self.texts[request], self.models[request] = text_of(request, expert, asked, weights), model or self.model
        return self

    def quantum(self, quantum_s=1.0, undisturbed_s=None):
        models = [self.models[each] for each in self.texts]
        lacking = self.engine.run(list(self.texts.values()), models, quantum_s, undisturbed_s)
        self.finished |= {request: text.result for request, text in self.texts.items() if text.result is not None}
        self.texts = {request: text for request, text in self.texts.items() if text.result is None}
        return lacking

    def finish(self, quantum_s=1.0):
        while self.texts:
            self.quantum(quantum_s)
        return {request: notes.tokens for request, notes in self.notes.items()}


@pytest.fixture(params=ARENAS)
def made(request):
    """A kind of arena."""
    return request.param


@pytest.fixture
def desk():
    return Desk()
