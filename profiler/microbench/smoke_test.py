"""Which experts run at all: one image each, before anything that a broken one would spoil is measured.

An expert that packs may still fail when it is run, or answer with what is no number.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from agent.core.events import BatchFailed
from agent.core.request import Rejected
from experts.errors import ExpertError
from profiler.microbench.batches import ImageCycle
from profiler.microbench.texts import fails_at_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.measuring.rig import MeasuringRig
    from profiler.microbench.bench import Bench
    from profiler.workload.samples import Sample

logger = logging.getLogger(__name__)


def failing_experts(
    bench: Bench, copies: Sequence[ExpertCopy], progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, str]:
    """Experts of these copies that do not judge an image on the bench's processor, and why.

    Each is loaded as by the agent, and runs one of its samples, or an image of noise; a language model continues a
    made-up text.
    """
    if not copies:
        return {}
    failing: dict[str, str] = {}
    with bench.rig(copies).opened() as rig:
        for number, copy in enumerate(copies):
            progress(number, len(copies))
            reason = _failure(rig, copy, bench.samples.of(copy.expert.id))
            if reason is not None:
                logger.warning("cannot_run copy=%s processor=%s reason=%s", copy.name, bench.processor, reason)
                failing[copy.expert.id] = reason
    progress(len(copies), len(copies))
    return failing


def _failure(rig: MeasuringRig, copy: ExpertCopy, samples: Sequence[Sample]) -> str | None:
    try:
        rig.bring(copy)
        if copy.expert.takes_texts:
            return fails_at_texts(rig, copy)
        answer = rig.attempt(copy, ImageCycle(rig, copy, samples[:1]).next(1))
    except ExpertError as error:
        return error.message
    finally:
        rig.clear()
    if isinstance(answer, BatchFailed):
        return answer.reason
    (result,) = answer.results
    return result.reason.removeprefix(f"expert {copy.expert.id}: ") if isinstance(result, Rejected) else None
