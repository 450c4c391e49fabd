"""The legal moves of a copy in one memory, as a table. Nothing else in the project changes a residency.

    ABSENT --start_load--> LOADING --loaded--> RESIDENT --start_use--> IN_USE
       ^                      |                  |  ^                    |
       +----- load_failed ----+                  |  +----- end_use ------+   (the last of several uses)
       +------------------- evict ---------------+

A copy that runs, or is being copied on, is IN_USE, and has no way out but the end of its last use: so no running
expert is ever evicted. Using a copy again while it is IN_USE keeps it there; the pool counts the uses.
"""

from __future__ import annotations

from enum import StrEnum

from experts.errors import IllegalMove


class Residency(StrEnum):
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    IN_USE = "in use"


class Move(StrEnum):
    START_LOAD = "start_load"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    START_USE = "start_use"
    END_USE = "end_use"
    EVICT = "evict"


MOVES = {
    (Residency.ABSENT, Move.START_LOAD): Residency.LOADING,
    (Residency.LOADING, Move.LOADED): Residency.RESIDENT,
    (Residency.LOADING, Move.LOAD_FAILED): Residency.ABSENT,
    (Residency.RESIDENT, Move.START_USE): Residency.IN_USE,
    (Residency.RESIDENT, Move.EVICT): Residency.ABSENT,
    (Residency.IN_USE, Move.START_USE): Residency.IN_USE,
    (Residency.IN_USE, Move.END_USE): Residency.RESIDENT,
}


def after(copy: str, state: Residency, move: Move) -> Residency:
    """The state a move leads to. Raises IllegalMove, naming copy, state and move; nothing was changed then."""
    try:
        return MOVES[state, move]
    except KeyError:
        raise IllegalMove(copy, state, move) from None
