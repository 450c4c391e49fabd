"""Progress of requests in one quantum: pure arithmetic over the work that each request has left.

Guarantees: requests of a batch share a quantum's seconds evenly, and unused time goes to the others; a request reads
its prompt before it writes. Every request ends: each quantum adds at least one token (Orca, section 3.1), or the lease
is full and doubles, up to the most that the request may hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.core.performance import Performance
    from agent.core.request import Work


@dataclass(frozen=True, slots=True)
class SimulatedQuantum:
    """Seconds of one batch, and the work left of each unfinished request."""

    seconds: float
    unfinished: Mapping[int, Work]


def run_quantum(
    left: Mapping[int, Work], performances: Mapping[int, Performance], quantum_s: float
) -> SimulatedQuantum:
    """Runs a batch for ``quantum_s`` less the largest B and every K. ``performances``: by request."""
    seconds = max(each.B_s for each in performances.values()) + sum(each.K_s for each in performances.values())
    remaining_s = max(quantum_s - seconds, 0.0)
    after: dict[int, Work] = {}
    shortest_first = sorted(left, key=lambda request: (performances[request].tokens_s(left[request]), request))
    for position, request in enumerate(shortest_first):
        work, performance = left[request], performances[request]
        after[request] = _advanced(work, performance, remaining_s / (len(left) - position))
        used_s = performance.tokens_s(work) - performance.tokens_s(after[request])
        remaining_s = max(remaining_s - used_s, 0.0)
        seconds += used_s
    unfinished = {request: after[request] for request in left if after[request].prompt or after[request].output}
    return SimulatedQuantum(seconds, {request: _with_room(work) for request, work in unfinished.items()})


def _advanced(work: Work, performance: Performance, share_s: float) -> Work:
    """Work left after ``share_s``, or after one token where that takes longer, within the lease."""
    room = _room(work)
    most_read = min(work.prompt, room)
    read = _tokens(most_read, performance.K_prompt_s, share_s)
    written = 0
    if read == work.prompt:
        share_s -= read * performance.K_prompt_s
        written = _tokens(min(work.output, room - read), performance.K_output_s, share_s)
    if not read + written:
        read = min(most_read, 1)
        written = 0 if work.prompt else min(work.output, room, 1)
    return replace(work, prompt=work.prompt - read, output=work.output - written, held=work.held + read + written)


def _room(work: Work) -> int:
    """Tokens left in the lease; a request beyond its most is not held back."""
    if work.lease is None or work.held >= work.most:
        return work.prompt + work.output
    return max(work.leased - work.held, 0)


def _with_room(work: Work) -> Work:
    if work.lease is None or _room(work):
        return work
    return replace(work, lease=max(2 * work.lease, 1))


def _tokens(most: int, token_s: float, share_s: float) -> int:
    if token_s * most <= share_s:
        return most
    return max(int(share_s / token_s), 0)
