"""What the core's tests build their lines of."""

from __future__ import annotations

from agent.core import demand, failures
from agent.core.performance import Limits

CONSTANTS = {
    "load_attempts": (failures, "LOAD_ATTEMPTS"),
    "load_backoff_s": (failures, "LOAD_BACKOFF_S"),
    "away_s": (failures, "AWAY_S"),
    "longest_away_pause_s": (failures, "LONGEST_AWAY_PAUSE_S"),
    "batch_attempts": (failures, "BATCH_ATTEMPTS"),
    "expert_failures": (failures, "EXPERT_FAILURES"),
    "probation_s": (failures, "PROBATION_S"),
    "longest_pause_s": (failures, "LONGEST_PAUSE_S"),
    "budget_pause_s": (failures, "BUDGET_PAUSE_S"),
    "prefetch_groups": (demand, "PREFETCH_GROUPS"),
    "long_queue_s": (demand, "LONG_QUEUE_S"),
}


def limits(pools, *args, **chosen) -> Limits:
    """Limits, and constants of the core until the test ends."""
    for key in chosen.keys() & CONSTANTS.keys():
        setattr(*CONSTANTS[key], chosen.pop(key))
    return Limits(pools, *args, **chosen)


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]
