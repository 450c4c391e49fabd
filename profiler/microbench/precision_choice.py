"""Which precision each kind of a line's experts runs in on a processor (``precision: auto``).

The fastest that agrees with fp32 on the samples of all experts of the kind, asked in that order and no further than
needed, and again when experts or samples are others than they were; without samples fp32. Experts of a kind run alike:
what those with samples agree in holds for the others, and a note says for which. What the line file gives is taken as
the agent takes it, with a profile or without: a kind that does not run in it is left off the processor, as is one of
which no form may be taken.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from agent.deployment.profile_in_use import precision_of
from agent.device_profile.identity import packed_sha256
from agent.runtime.expert_copy import by_kind
from experts.expert import Precision
from experts.sizes import mib
from profiler.microbench.agreement import choose_precision, compare, image_s
from profiler.microbench.texts import TEXTS_SHA256, compare_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agent.config import LineConfig
    from agent.device_profile.records import Agreement, KindProfile
    from agent.device_profile.store import ProfileDraft
    from agent.runtime.expert_copy import ExpertCopy
    from profiler.microbench.kinds import Bench
    from profiler.microbench.packed_forms import LinePacking

COMPARED_FRACTION = 0.8  # of the free memory: an exact copy that takes more is not compared with
NAMED_EXPERTS = 3  # in one note; of more their number is told


class PrecisionChoice:
    """The choice of one profiling run; comparisons are saved in the draft.

    ``notes``: what stays fp32 or is left off a processor, and why; what was chosen by some of a kind's experts only.
    """

    def __init__(
        self,
        config: LineConfig,
        packing: LinePacking,
        draft: ProfileDraft,
        tolerance: float,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.notes: list[str] = []
        self._config = config
        self._packing = packing
        self._draft = draft
        self._tolerance = tolerance
        self._progress = progress

    def forget_changed(self, references: Sequence[ExpertCopy]) -> None:
        """Give up agreements of kinds of which an expert came, or has other weights than when they were found."""
        then = self._draft.packed()
        now = {(copy.expert.id, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in references}
        changed = {
            copy.kind for copy, (name, digest) in zip(references, now.items(), strict=True) if then.get(name) != digest
        }
        for agreement in self._draft.agreements():
            if agreement.kind in changed:
                self._draft.save_agreement(replace(agreement, images=0))
        self._draft.save_packed({**then, **now})  # after them: were it killed between, they are given up once more

    def on(self, bench: Bench, references: Sequence[ExpertCopy]) -> dict[str, str]:
        """The form of each kind that was measured on the bench's processor, but for those that are left off it."""
        measured: defaultdict[str, list[KindProfile]] = defaultdict(list)
        for each in self._draft.kinds():
            if each.processor == bench.processor:
                measured[each.kind].append(each)
        chosen = {
            kind: self._given(bench, measured[kind], listed)
            if listed[0].expert.precision is not None or self._config.precision_beside(listed[0].expert) is not None
            else self._fastest_that_agrees(bench, measured[kind], listed)
            for kind, listed in by_kind(references).items()
            if measured[kind]
        }
        return {kind: form for kind, form in chosen.items() if form is not None}

    def _given(self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]) -> str | None:
        """The form that the agent runs by the line file; None where the kind does not run in it."""
        form = precision_of(self._config, references[0].expert.id, bench.processor, None, None)
        if any(profile.precision == form for profile in profiles):
            if form is Precision.INT8:
                self._tell_int8(bench, references)
            return str(form)
        self._left_off(
            profiles[0], f"it does not run in {form}, which the line file gives - write `precision: auto`, or another"
        )
        return None

    def _tell_int8(self, bench: Bench, references: Sequence[ExpertCopy]) -> None:
        """How much it differs: it is not chosen by that, but whoever chose it wants to know."""
        wanted = {copy.expert.id: {Precision.FP32} for copy in references}
        packed = self._packing.pack(wanted, f"pack fp32 for {bench.processor}: {references[0].kind}")
        exact = [copy for copy in packed[Precision.FP32] if copy.expert.id in wanted]
        largest_bytes = max((copy.footprint.total_bytes for copy in exact), default=0)
        pool = bench.box.pool_of(bench.processor)
        if not exact or largest_bytes > COMPARED_FRACTION * bench.box.size_of(pool).available_bytes:
            reason = f"in fp32 it takes {mib(largest_bytes)}" if exact else "it cannot be packed in fp32"
            self.notes.append(f"{references[0].kind} on {bench.processor} is not compared with fp32: {reason}")
            return
        agreement, told = compare_texts(bench, exact, references, self._tolerance)
        self._draft.save_agreement(agreement)
        self.notes.append(f"{agreement.kind} in int8 on {bench.processor} against fp32: {told}")

    def _fastest_that_agrees(
        self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]
    ) -> str | None:
        is_fp32_able = any(profile.precision == Precision.FP32 for profile in profiles)
        sampled = [copy for copy in references if copy.expert.takes_texts or bench.samples.of(copy.expert.id)]
        agreements: list[Agreement] = []
        for profile in sorted(profiles, key=image_s):
            if profile.precision == Precision.FP32:
                break
            if not sampled:
                self._not_proven(profile, "no sample images", is_fp32_able=is_fp32_able)
                break
            form = Precision(profile.precision)
            if form is Precision.ONEDNN_INT8 and (reason := self._why_not_eight_bits(references)) is not None:
                self.notes.append(f"{profile.kind} on {profile.processor} is not run in {form}: {reason}")
                continue
            agreement = self._agreement(bench, form, sampled)
            if agreement is None:
                continue
            agreements.append(agreement)
            if not agreement.images:
                reason = "none of its sample images can be judged"
                self._not_proven(profile, reason, is_fp32_able=is_fp32_able)
                break
            if agreement.agrees:
                break
        if not is_fp32_able and not any(each.images and each.agrees for each in agreements):
            self._left_off(profiles[0], "fp32 does not run there, and no other precision is proven to agree with it")
            return None
        chosen = choose_precision(profiles, agreements)
        if chosen != Precision.FP32 and len(sampled) < len(references):
            self._taken_for_others(profiles[0], chosen, references, {copy.expert.id for copy in sampled})
        return chosen

    def _why_not_eight_bits(self, references: Sequence[ExpertCopy]) -> str | None:
        """All experts of a kind run alike, and one that is not calibrated has no such form."""
        reasons = {copy.expert.id: self._packing.why_not_calibrated(copy.expert.id) for copy in references}
        told = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
        more = f" (and {len(told) - 1} more experts)" if len(told) > 1 else ""
        return f"{told[0]}{more}" if told else None

    def _agreement(self, bench: Bench, form: Precision, sampled: Sequence[ExpertCopy]) -> Agreement | None:
        """Of all experts with samples, unless an earlier one holds; None where none of them is there in this form.

        A form of eight bits is judged by images that it was not calibrated on.
        """
        if form is Precision.ONEDNN_INT8:
            bench = replace(bench, samples=bench.samples.held_out())
        kind = sampled[0].kind
        key = (kind, bench.processor, str(form))
        earlier = {(each.kind, each.processor, each.precision): each for each in self._draft.agreements()}.get(key)
        are_texts = sampled[0].expert.takes_texts
        samples = TEXTS_SHA256 if are_texts else bench.samples.sha256(copy.expert.id for copy in sampled)
        terms = (self._tolerance, samples)
        if earlier is not None and earlier.images and (earlier.tolerance, earlier.samples_sha256) == terms:
            return earlier
        wanted = {copy.expert.id: {form} for copy in sampled}
        packed = self._packing.pack(wanted, f"pack {form} for {bench.processor}: {kind}")
        others = [copy for copy in packed[form] if copy.expert.id in wanted]
        if not others:
            return None
        stage = f"compare {form} on {bench.processor}: {kind}"
        self._progress(stage, 0, 1)
        if are_texts:
            agreement, told = compare_texts(bench, sampled, others, self._tolerance)
            self.notes.append(f"{kind} in {form} on {bench.processor} against fp32: {told}")
        else:
            agreement = compare(bench, sampled, others, self._tolerance)
        self._draft.save_agreement(agreement)
        self._progress(stage, 1, 1)
        return agreement

    def _not_proven(self, profile: KindProfile, reason: str, *, is_fp32_able: bool) -> None:
        if is_fp32_able:
            self.notes.append(
                f"{profile.kind} on {profile.processor} stays fp32: {reason}, so {profile.precision} is not proven to "
                "agree"
            )

    def _taken_for_others(
        self, profile: KindProfile, form: str, references: Sequence[ExpertCopy], compared: Collection[str]
    ) -> None:
        others = [copy.expert.id for copy in references if copy.expert.id not in compared]
        more = len(others) - NAMED_EXPERTS
        named = ", ".join(others[:NAMED_EXPERTS]) + (f" and {more} more" if more > 0 else "")
        self.notes.append(
            f"{profile.kind} in {form} on {profile.processor}: {len(compared)} of its {len(references)} experts were "
            f"compared with fp32, and there are no sample images of {named} - give --samples FOLDER with images of "
            "their components, too"
        )

    def _left_off(self, profile: KindProfile, reason: str) -> None:
        self.notes.append(f"{profile.kind} is not run on {profile.processor}: {reason}")
