"""How far requests come in one quantum: pure arithmetic over the work that each has left.

Guarantees: a quantum's seconds are shared evenly among the requests of a batch, and what one does not need goes to the
others; each reads its prompt before it writes; each gets one token further at least, as an iteration does (Orca,
section 3.1), so that every request ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.performance import Performance
    from agent.core.request import Work


@dataclass(frozen=True, slots=True)
class Quantum:
    """What a batch did: how long it took, and the work that each request that is not done has left."""

    seconds: float
    unfinished: Mapping[int, Work]


def run_quantum(left: Mapping[int, Work], performance: Performance, quantum_s: float) -> Quantum:
    """One batch of these requests, at least one, for ``quantum_s``: B and every K of it come off first."""
    seconds = performance.latency_s(len(left))
    remaining_s = max(quantum_s - seconds, 0.0)
    after: dict[int, Work] = {}
    shortest_first = sorted(left, key=lambda request: (performance.tokens_s(left[request]), request))
    for position, request in enumerate(shortest_first):
        work = left[request]
        after[request] = _advanced(work, performance, remaining_s / (len(left) - position))
        used_s = performance.tokens_s(work) - performance.tokens_s(after[request])
        remaining_s = max(remaining_s - used_s, 0.0)
        seconds += used_s
    return Quantum(seconds, {request: after[request] for request in left if not _is_done(after[request])})


def _advanced(work: Work, performance: Performance, share_s: float) -> Work:
    """The work that is left after so many seconds of it, or after one token if that takes longer."""
    read = _tokens(work.prompt, performance.K_prompt_s, share_s)
    written = 0
    if read == work.prompt:
        share_s -= read * performance.K_prompt_s
        written = _tokens(work.output, performance.K_output_s, share_s)
    if not read + written:
        read, written = min(work.prompt, 1), min(work.output, 0 if work.prompt else 1)
    return replace(work, prompt=work.prompt - read, output=work.output - written)


def _tokens(most: int, token_s: float, share_s: float) -> int:
    if token_s * most <= share_s:
        return most
    return max(int(share_s / token_s), 0)


def _is_done(work: Work) -> bool:
    return not (work.prompt or work.output)
