"""Trial of a caller's grammar, in a process of its own, before the agent compiles it.

llguidance bounds most of its work, not all: deep references overflow the stack, and intersections of patterns compile
for minutes. Guarantees: a grammar that passed ``check`` compiles here within TRIAL_S, with less stack than a thread of
the agent has, and can be continued for some tokens. A hostile one ends a fork of a child. A grammar is tried once.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import random
from collections import OrderedDict
from functools import partial
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING, Any

from experts.children.bounded import BoundedProcess, BoundedWork, ResourceLimits
from experts.errors import GrammarInvalid, WeightsRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llguidance import LLMatcher, LLParserLimits

MOST_BYTES = 128 * 1024  # of a grammar
TRIAL_S = 2
LIMITS = ResourceLimits(memory_bytes=512 * 2**20, written_bytes=0, processor_s=TRIAL_S, clock_s=5 * TRIAL_S)
STACK_BYTES = 2**20  # a thread of the agent has eight times as much
TRIED_TOKENS = 32
REASON_CHARACTERS = 300
KNOWN = 256  # grammars that were tried


class GrammarTrials:
    """For any thread. One trial at a time; the child is started when it is needed."""

    def __init__(self) -> None:
        self._process = BoundedProcess(is_bare=True)
        atexit.register(self._process.close)
        self._faults: OrderedDict[bytes, str | None] = OrderedDict()  # by digest of a grammar; None: it has passed
        self._lock = Lock()

    def check(self, grammar: Mapping[str, Any], field: str) -> None:
        """Raises GrammarInvalid with this field, and LoadError if no process can be started."""
        check_size(grammar, field)
        text = json.dumps({"grammars": [grammar]})
        digest = hashlib.sha256(text.encode()).digest()
        with self._lock:
            is_known, fault = digest in self._faults, self._faults.get(digest)
        if not is_known:
            fault = self._fault(text, field)
        with self._lock:
            self._faults[digest] = fault
            self._faults.move_to_end(digest)
            while len(self._faults) > KNOWN:
                self._faults.popitem(last=False)
        if fault is not None:
            raise GrammarInvalid(field, f"cannot be served: {fault}")

    def _fault(self, text: str, field: str) -> str | None:
        work = BoundedWork(partial(fault_of, text), LIMITS, "it needs too much memory", _ended_by)
        try:
            fault: str | None = self._process.result(work, field)
        except WeightsRefused as error:
            return error.message
        return fault


def check_size(value: object, field: str) -> None:
    """Raises GrammarInvalid beyond MOST_BYTES as JSON."""
    if (size := len(json.dumps(value))) > MOST_BYTES:
        raise GrammarInvalid(field, f"has {size} bytes, where {MOST_BYTES} are the most: make it smaller")


def _ended_by(code: int) -> str:
    if code in (-11, -6):
        return "it is nested too deeply, or needs too much memory"
    return f"it takes more than {TRIAL_S} s to compile"


def fault_of(grammar: str) -> str | None:
    """Reason why a grammar cannot be served. For a process that may end here."""
    faults: list[str | None] = []
    stack_size(STACK_BYTES)
    thread = Thread(target=lambda: faults.append(_fault(grammar)))
    thread.start()
    thread.join()
    return faults[0] if faults else "the library has failed"


def _fault(grammar: str) -> str | None:
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits())
    drawing = random.Random(0)
    try:
        for _ in range(TRIED_TOKENS):
            bits = int.from_bytes(mask_of(matcher), "little")
            allowed = [token for token in range(256) if bits >> token & 1]
            if not allowed:
                break
            matcher.consume_token(drawing.choice(allowed))
            if matcher.is_stopped() and not matcher.is_error():
                break
    except ValueError as error:
        return str(error)
    return None


def parser_limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=20_000, max_grammar_size=100_000,
        precompute_large_lexemes=False, verbose_errors=False,
    )  # fmt: skip


def mask_of(matcher: LLMatcher) -> bytes:
    """A bit for each token that may come next. Raises ValueError with the library's reason."""
    bits = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        lines = matcher.get_error().strip().splitlines() or ["the library gives no reason"]
        reason = next((line for line in lines if line.startswith("error: ")), lines[0])
        raise ValueError(reason.removeprefix("error: ")[:REASON_CHARACTERS])
    return bits
