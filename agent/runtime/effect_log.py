"""Log of the Engine's decisions: an error or a warning where a technician may have to act."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agent.core import effects

if TYPE_CHECKING:
    from agent.core.effects import Effect

logger = logging.getLogger("agent.runtime.loop")  # name kept for log filters

LOWERED_ADVICE = (
    ": the box has less memory than was planned with, and more is tried later; if it stays so, end what else takes it, "
    "or lower memory."
)


def log_effect(effect: Effect) -> None:
    match effect:
        case effects.Evict():
            logger.debug(
                "expert_evicted expert=%s pool=%s size_bytes=%d stage=%d for=%s",
                effect.expert, effect.pool, effect.freed_bytes, effect.stage, effect.decision.for_copy,
            )  # fmt: skip
        case effects.Preempt():
            logger.debug("text_preempted request=%d executor=%d", effect.request, effect.executor)
        case effects.StandingChanged(expert, effects.Standing.QUARANTINE, reason):
            logger.error("expert_quarantined expert=%s reason=%s", expert, reason)
        case effects.StandingChanged(expert, effects.Standing.PROBATION, reason):
            logger.warning("expert_on_probation expert=%s retry_s=%.1f reason=%s", expert, effect.retry_s, reason)
        case effects.StandingChanged(expert, _, reason):
            logger.info("expert_serves_again expert=%s reason=%s", expert, reason)
        case effects.FellBack():
            logger.warning(
                "expert_falls_back expert=%s pool=%s requests=%d retry_s=%.1f reason=%s: "
                "other executors get its requests",
                effect.expert, effect.pool, effect.requests, effect.retry_s, effect.reason,
            )  # fmt: skip
        case effects.BudgetChanged(pool, before_bytes, after_bytes, reason):
            is_lower = after_bytes < before_bytes
            logger.log(
                logging.ERROR if is_lower else logging.WARNING,
                "memory_budget_%s pool=%s from_bytes=%d to_bytes=%d reason=%s%s",
                "lowered" if is_lower else "raised", pool, before_bytes, after_bytes, reason,
                LOWERED_ADVICE + pool if is_lower else "",
            )  # fmt: skip
        case effects.LeasesChanged(pool, before_bytes, after_bytes, reason):
            logger.log(
                logging.ERROR if after_bytes < before_bytes else logging.WARNING,
                "memory_leases_changed pool=%s from_bytes=%d to_bytes=%d reason=%s: so much is for what texts hold",
                pool, before_bytes, after_bytes, reason,
            )  # fmt: skip
