"""Measures the tokens of language models on one processor in one precision, and compares two precisions.

Guarantees: iterations take the agent's own path; texts come from a fixed seed. Two precisions are compared on texts
that fp32 writes greedily from random prompts: they agree if each position has the same most likely token, with
probabilities within the tolerance; positions where fp32's two most likely tokens are closer than that do not count.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from agent.device_profile.records import Agreement, BatchTimes
from agent.runtime.measuring.fits import LEAST_S, fit_latency
from agent.runtime.measuring.loads import alike, measure_loads
from agent.runtime.measuring.text_times import TextTimer, on_executor_thread
from experts.backends import backend_for
from experts.errors import BackendUnavailable, ExpertError
from experts.expert import Precision
from experts.llm.arenas.extents import ModelKeyValues
from experts.llm.token_batch import Chunk, TokenBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agent.device_profile.records import KindProfile
    from agent.runtime.expert_copy import ExpertCopy
    from agent.runtime.measuring.meter import WorkspaceMeter
    from agent.runtime.measuring.rig import MeasuringRig
    from experts.llm.model import LanguageModel
    from profiler.microbench.bench import Bench

ROWS = (1, 2, 4, 8, 16, 32, 64)
TEXTS, PROMPT_TOKENS, WRITTEN_TOKENS = 6, 12, 24
MADE_UP, ESTIMATED = "made-up texts", "workspace estimated from shapes"  # KindProfile.samples
TEXTS_SHA256 = hashlib.sha256(f"{TEXTS} {PROMPT_TOKENS} {WRITTEN_TOKENS} 0".encode()).hexdigest()


def measure_texts(
    rig: MeasuringRig, bench: Bench, copy: ExpertCopy, copies: Sequence[ExpertCopy], meter: WorkspaceMeter | None
) -> KindProfile:
    """Profile of a kind of language models, measured on ``copy``. Raises ExpertError where it cannot be run."""
    load_s = measure_loads(rig, alike(copy, copies))
    rig.bring(copy)
    with rig.model_of(copy) as model:
        timer = TextTimer(copy.expert.id, model, bench.options.limit_s, ROWS)
        times = on_executor_thread(lambda: timer.times(bench.options.repeats), rig.device, rig.threads)
        batches = tuple(
            BatchTimes(rows, seconds, _workspace_bytes(rig, copy, timer, rows, meter))
            for rows, seconds in times.write_s.items()
        )
    token_bytes = backend_for(copy.expert.architecture).token_bytes(copy.expert, Precision(copy.packed.precision))
    return bench.kind_profile(
        copy,
        load_s,
        batches,
        K_s=LEAST_S,
        B_s=max(times.fixed_s, LEAST_S),
        fit_error=fit_latency(batches).error,
        max_batch=times.max_batch,
        weight_bytes=sum(segment.slot_bytes for segment in copy.segments),
        samples=MADE_UP if meter else f"{MADE_UP}; {ESTIMATED}",
        K_prompt_s=times.per_prompt_token_s,
        K_output_s=times.per_output_token_s,
        lease_bytes=token_bytes,
    )


def fails_at_texts(rig: MeasuringRig, copy: ExpertCopy) -> str | None:
    """Reason why a model on the rig cannot read and write; None where it can."""
    try:
        with rig.model_of(copy) as model:
            timer = TextTimer(copy.expert.id, model, 0.0)
            on_executor_thread(lambda: timer.write_s(1), rig.device, rig.threads)
    except ExpertError as error:
        return error.message
    return None


def compare_texts(
    bench: Bench, fp32: Sequence[ExpertCopy], other: Sequence[ExpertCopy], tolerance: float
) -> tuple[list[Agreement], str]:
    """Agreements of one kind's models in fp32 and another precision, and a sentence on how far these are apart.

    A model that cannot be run in the other precision differs everywhere.
    """
    others = {copy.expert.id: copy for copy in other}
    found: dict[str, Apart] = {}
    with bench.rig([*fp32, *other]).opened() as rig:
        for copy in fp32:
            expected = _logits_of(rig, copy, None)
            if expected is not None:
                seen = _logits_of(rig, others[copy.expert.id], expected) if copy.expert.id in others else None
                found[copy.expert.id] = _apart(expected, seen, tolerance)
    agreements = [
        Agreement(
            expert=name,
            kind=fp32[0].kind,
            processor=bench.processor,
            precision=other[0].packed.precision,
            images=apart.positions,
            labels_differ=apart.differ,
            largest_score_difference=apart.largest,
            tolerance=tolerance,
            of_sha256=TEXTS_SHA256,
            least=1,
        )
        for name, apart in found.items()
    ]
    positions = sum(each.positions for each in found.values())
    error = max((each.relative_error for each in found.values()), default=0.0)
    largest = max((each.largest for each in found.values()), default=0.0)
    same = sum(each.same_best for each in found.values())
    return agreements, (
        f"the same likeliest token at {same} of {positions} positions, probabilities up to "
        f"{largest:.3f} apart, logits off by {error:.1%}"
    )


@dataclass(frozen=True, slots=True)
class ModelLogits:
    """``logits`` at each position of the texts, in fp32 on the CPU: (positions, vocabulary)."""

    texts: tuple[tuple[int, ...], ...]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Apart:
    """Two models on the same texts. ``differ``: positions where fp32 is clear and the other likeliest token differs."""

    positions: int
    differ: int
    same_best: int
    largest: float
    relative_error: float


def _apart(expected: ModelLogits, found: ModelLogits | None, tolerance: float) -> Apart:
    positions = len(expected.logits)
    if found is None:
        return Apart(positions, positions, 0, 1.0, 1.0)
    first, second = expected.logits.softmax(dim=-1), found.logits.softmax(dim=-1)
    best = expected.logits.argmax(dim=-1)
    same = best == found.logits.argmax(dim=-1)
    two = first.topk(2, dim=-1).values
    is_decided = two[:, 0] - two[:, 1] > tolerance
    largest = (first.gather(-1, best[:, None]) - second.gather(-1, best[:, None])).abs().max()
    error = (found.logits - expected.logits).norm() / expected.logits.norm().clamp(min=1e-30)
    return Apart(positions, int((is_decided & ~same).sum()), int(same.sum()), float(largest), float(error))


def _logits_of(rig: MeasuringRig, copy: ExpertCopy, like: ModelLogits | None) -> ModelLogits | None:
    """Logits on the texts of ``like``, or on texts that the model writes; None where the model cannot be run."""
    try:
        rig.bring(copy)
        with rig.model_of(copy) as model:
            found = on_executor_thread(lambda: _read(model, like or _written(model)), rig.device, rig.threads)
    except (ExpertError, BackendUnavailable):
        return None
    finally:
        rig.clear()
    return found if bool(found.logits.isfinite().all()) else None


def _written(model: LanguageModel) -> ModelLogits:
    chance = random.Random(0)
    longest = model.spec.max_positions
    prompt = min(PROMPT_TOKENS, max(longest // 2, 1))
    texts = [[chance.randrange(model.spec.vocab_size) for _ in range(prompt)] for _ in range(TEXTS)]
    key_values = ModelKeyValues(model.spec, model.dtype, model.device)
    chunks = [Chunk(number, 0, text) for number, text in enumerate(texts)]
    for _ in range(min(WRITTEN_TOKENS, longest - prompt)):
        best = model.forward(TokenBatch.of(chunks, model.device), key_values).argmax(dim=-1).tolist()
        chunks = [
            Chunk(number, len(text), [token]) for number, (text, token) in enumerate(zip(texts, best, strict=True))
        ]
        for text, token in zip(texts, best, strict=True):
            text.append(token)
    return ModelLogits(tuple(tuple(text) for text in texts), torch.empty(0))


def _read(model: LanguageModel, like: ModelLogits) -> ModelLogits:
    key_values = ModelKeyValues(model.spec, model.dtype, model.device)
    batch = TokenBatch.of([Chunk(number, 0, text) for number, text in enumerate(like.texts)], model.device)
    return replace(like, logits=model.logits(model.hidden(batch, key_values)).float().cpu())


def _workspace_bytes(
    rig: MeasuringRig, copy: ExpertCopy, timer: TextTimer, rows: int, meter: WorkspaceMeter | None
) -> int:
    """Bytes of the largest iteration with ``rows`` texts, without keys and values, which are leased."""
    backend, precision = backend_for(copy.expert.architecture), Precision(copy.packed.precision)
    if meter is None:
        return backend.workspace_bytes(copy.expert, precision, rows)
    held: list[int] = []
    run = lambda: held.append(timer.full_iteration(rows))  # noqa: E731  what the meter calls
    peak_bytes = on_executor_thread(lambda: meter.peak_bytes(run), rig.device, rig.threads)
    return max(peak_bytes - held[0], 0)
