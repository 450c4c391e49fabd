"""Which form each expert of a line runs in on a processor (``precision: auto``): the fastest that is proven for it.

A form is proven for an expert by samples of its own (``agreement``); forms are asked in the order of their times at the
batches that occur, as far as they are clearly faster than the reference, and again when weights, samples, thresholds
or routes are others than they were. Whoever has too few samples runs in fp32, as do experts that join later: also the
forms of the same numbers are not taken unproven, as their operators make 0 of what is no number where torch's say so.
Experts that share tensors run alike, in what is proven for all of them: each further form would hold the tensors again.

What the line file gives is taken as the agent takes it, with a profile or without: a kind that does not run in it is
left off the processor, as is one of which no form may be taken.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.deployment.profile_in_use import precision_of
from agent.device_profile.identity import packed_sha256, verdict_sha256
from agent.device_profile.records import ExpertForm
from agent.runtime.expert_copy import by_kind
from experts.backends.forms import runs_as, why_absent
from experts.expert import Precision
from experts.sizes import mib
from profiler.microbench import agreement
from profiler.microbench.agreement import candidate_precisions, compare, image_s, is_clearly_faster, terms_sha256
from profiler.microbench.texts import TEXTS_SHA256, compare_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.device_profile.records import Agreement, KindProfile
    from agent.device_profile.store import ProfileDraft
    from agent.runtime.expert_copy import ExpertCopy
    from profiler.microbench.kinds import Bench
    from profiler.microbench.packed_forms import LinePacking

EXACT = "nothing that was measured is clearly faster"
GIVE_MORE = " - give --samples FOLDER with more of its component"
COMPARED_FRACTION = 0.8  # of the free memory: an exact copy that takes more is not compared with


@dataclass(frozen=True, slots=True)
class Chosen:
    """What experts run in on one processor: by kind, and where there is a choice each expert's own."""

    kinds: Mapping[str, str]
    experts: tuple[ExpertForm, ...]


class PrecisionChoice:
    """The choice of one profiling run; comparisons are saved in the draft.

    ``notes``: who stays in the reference, or is left off a processor, and why.
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
        """Give up agreements of experts that came, or have other weights than when they were found."""
        then = self._draft.packed()
        now = {(copy.expert.id, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in references}
        changed = {name for (name, form), digest in now.items() if then.get((name, form)) != digest}
        for each in self._draft.agreements():
            if each.expert in changed:
                self._draft.save_agreement(replace(each, images=0))
        self._draft.save_packed({**then, **now})  # after them: were it killed between, they are given up once more

    def on(self, bench: Bench, references: Sequence[ExpertCopy]) -> Chosen:
        """What runs of all that was measured on the bench's processor, but for what is left off it."""
        measured: defaultdict[str, list[KindProfile]] = defaultdict(list)
        for each in self._draft.kinds():
            if each.processor == bench.processor:
                measured[each.kind].append(each)
        kinds: dict[str, str] = {}
        experts: list[ExpertForm] = []
        for kind, listed in by_kind(references).items():
            if not measured[kind]:
                continue
            if listed[0].expert.precision is not None or self._config.precision_beside(listed[0].expert) is not None:
                form = self._given(bench, measured[kind], listed)
            else:
                form, own = self._fastest_that_are_proven(bench, measured[kind], listed)
                experts += own
            if form is not None:
                kinds[kind] = form
        return Chosen(kinds, tuple(experts))

    def _given(self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]) -> str | None:
        """The form that the agent runs by the line file; None where the kind does not run in it."""
        form = precision_of(self._config, references[0].expert.id, bench.processor, None, None)
        if runs_as(form) is not form:
            told = f"{references[0].kind} on {bench.processor} runs in {form.plain}, not in {form}"
            self.notes.append(f"{told}, which does not run on this CPU: {why_absent(form)}; write `precision: auto`")
            form = form.plain
        if form is Precision.ONEDNN_INT8:
            form = self._given_eight_bits(bench, references)
        if any(profile.precision == form for profile in profiles):
            if form is Precision.INT8:
                self._tell_int8(bench, references)
            return str(form)
        self._left_off(
            profiles[0], f"it does not run in {form}, which the line file gives - write `precision: auto`, or another"
        )
        return None

    def _given_eight_bits(self, bench: Bench, references: Sequence[ExpertCopy]) -> Precision:
        """The form of the kind: experts that are not calibrated run in another, as the agent has it; that is told."""
        form = Precision.ONEDNN_INT8
        without = {
            copy.expert.id: self._packing.why_not_calibrated(copy.expert.id)
            for copy in references
            if self._packing.runs_in(copy.expert.id, form) is not form
        }
        if without:
            told = f"{len(without)} of the {len(references)} experts of {references[0].kind} on {bench.processor}"
            self.notes.append(f"{told} run in {form.plain}, not in {form}: {_named(without)}")
        return form.plain if len(without) == len(references) else form

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
        found, told = compare_texts(bench, exact, references, self._tolerance)
        for each in found:
            self._draft.save_agreement(each)
        self.notes.append(f"{references[0].kind} in int8 on {bench.processor} against fp32: {told}")

    def _fastest_that_are_proven(
        self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]
    ) -> tuple[str | None, list[ExpertForm]]:
        """The form of experts without one of their own, None for none; and each expert's."""
        self._tell_untried(bench, profiles, references)
        exact = next((each for each in profiles if each.precision == Precision.FP32), None)
        faster = [each for each in sorted(profiles, key=image_s) if exact is None or is_clearly_faster(each, exact)]
        proofs: dict[str, str] = {}
        whys: dict[str, str] = {}  # why experts are not in the fastest form
        found: dict[str, tuple[Precision, str]] = {}
        for form in (Precision(each.precision) for each in faster):
            left = [group for group in _groups(references) if group[0].expert.id not in found]
            asked = [copy for group in left for copy in group]
            refuted = self._refuted(bench, form, asked, proofs) if asked else {}
            for group in left:
                reasons = {copy.expert.id: refuted[copy.expert.id] for copy in group if copy.expert.id in refuted}
                if not reasons:
                    found |= {copy.expert.id: (form, whys.get(copy.expert.id, "")) for copy in group}
                for copy in group if reasons else ():
                    name, (first, reason) = copy.expert.id, next(iter(reasons.items()))
                    told = reasons.get(name, f"it shares tensors with {first}, of which {reason}")
                    whys.setdefault(name, f"not in {form}: {told}")
        if exact is not None:
            found = {copy.expert.id: (Precision.FP32, whys.get(copy.expert.id, "")) for copy in references} | found
        if not found:
            self._left_off(profiles[0], "fp32 does not run there, and no other precision is proven to agree with it")
        elif whys:
            told = f"{len(whys)} of the {len(references)} experts of {profiles[0].kind} on {bench.processor}"
            self.notes.append(f"{told} stay behind the fastest form: {_named(whys)}")
        graph = self._config.catalog.graph
        own = [
            ExpertForm(
                expert=name,
                processor=bench.processor,
                kind=copy.kind,
                precision=form,
                why=why or proofs.get(name, EXACT),
                verdict_sha256=verdict_sha256(graph, copy.expert),
            )
            for copy in references
            if (name := copy.expert.id) in found
            for form, why in [found[name]]
        ]
        return (None if exact is None else exact.precision), own

    def _refuted(
        self, bench: Bench, form: Precision, references: Sequence[ExpertCopy], proofs: dict[str, str]
    ) -> dict[str, str]:
        """The experts that a form may not be taken for, and why; what speaks for the others joins ``proofs``."""
        if form is Precision.ONEDNN_INT8:
            bench = replace(bench, samples=bench.samples.held_out())
        least = agreement.LEAST_IMAGES
        refuted: dict[str, str] = {}
        asked = []
        for copy in references:
            name, images = copy.expert.id, len(bench.samples.of(copy.expert.id))
            if not copy.expert.takes_texts and images < least:
                refuted[name] = f"it has {images or 'no'} sample images for that, and a proof takes {least}{GIVE_MORE}"
            elif form is Precision.ONEDNN_INT8 and (reason := self._packing.why_not_calibrated(name)) is not None:
                refuted[name] = reason
            else:
                asked.append(copy)
        known = {(each.expert, each.processor, each.precision): each for each in self._draft.agreements()}
        earlier = {
            copy.expert.id: each
            for copy in asked
            if (each := known.get((copy.expert.id, bench.processor, form))) is not None
            and each.images
            and (each.tolerance, each.of_sha256) == (self._tolerance, self._terms(bench, copy))
        }
        missing = [copy for copy in asked if copy.expert.id not in earlier]
        others: list[ExpertCopy] = []
        if missing:
            told = f"pack {form} for {bench.processor}: {references[0].kind}"
            wanted = {copy.expert.id: {form} for copy in missing}
            others = [copy for copy in self._packing.pack(wanted, told)[form] if copy.expert.id in wanted]
            lying = {copy.expert.id for copy in others}
            refuted |= {name: "it cannot be packed in it" for name in wanted if name not in lying}
        missing = [copy for copy in missing if copy.expert.id not in refuted]
        found = [*earlier.values(), *self._compared(bench, form, missing, others)]
        refuted = {copy.expert.id: "fp32 itself judges none of its samples" for copy in asked} | refuted
        for each in found:
            if each.proves:
                del refuted[each.expert]
            else:
                refuted[each.expert] = _why_not(each)
        proofs |= {each.expert: _why(each) for each in found if each.proves}
        return refuted

    def _compared(
        self, bench: Bench, form: Precision, references: Sequence[ExpertCopy], others: Sequence[ExpertCopy]
    ) -> list[Agreement]:
        """Each asked on its own samples, and saved."""
        if not references:
            return []
        kind = references[0].kind
        stage = f"compare {form} on {bench.processor}: {kind}"
        self._progress(stage, 0, 1)
        if references[0].expert.takes_texts:
            found, told = compare_texts(bench, references, others, self._tolerance)
            self.notes.append(f"{kind} in {form} on {bench.processor} against fp32: {told}")
        else:
            found = compare(bench, self._config.catalog.graph, references, others, self._tolerance)
        for each in found:
            self._draft.save_agreement(each)
        self._progress(stage, 1, 1)
        return found

    def _terms(self, bench: Bench, copy: ExpertCopy) -> str:
        if copy.expert.takes_texts:
            return TEXTS_SHA256
        return terms_sha256(bench.samples, self._config.catalog.graph, copy.expert)

    def _tell_untried(self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]) -> None:
        """That a kind with samples was not even timed in eight bits, as none of those that stand for it has them."""
        form, kind = Precision.ONEDNN_INT8, profiles[0]
        name = next((copy.expert.id for copy in references if bench.samples.of(copy.expert.id)), None)
        known = candidate_precisions(kind.architecture, bench.processor)
        if name is None or form not in known or any(profile.precision == form for profile in profiles):
            return
        if (reason := self._packing.why_not_calibrated(name)) is not None:
            self.notes.append(f"{kind.kind} on {bench.processor} is not run in {form}: {name}: {reason}")

    def _left_off(self, profile: KindProfile, reason: str) -> None:
        self.notes.append(f"{profile.kind} is not run on {profile.processor}: {reason}")


def _groups(references: Sequence[ExpertCopy]) -> list[list[ExpertCopy]]:
    """Experts that share tensors in the reference, also by way of others; most share none and are alone."""
    found: list[tuple[set[str], list[ExpertCopy]]] = []
    for copy in references:
        held, together = {segment.sha256 for segment in copy.packed.shared}, [copy]
        for group in [each for each in found if each[0] & held]:
            found.remove(group)
            held, together = held | group[0], [*group[1], *together]
        found.append((held, together))
    return [together for _, together in found]


def _why(found: Agreement) -> str:
    return f"{found.images} samples agree: at 95 % fewer than {3 / found.images:.1%} are decided otherwise"


def _why_not(found: Agreement) -> str:
    if found.labels_differ:
        return f"{found.labels_differ} of {found.images} samples are decided otherwise"
    if not found.agrees:
        return f"its scores differ by {found.largest_score_difference:.3f}"
    return f"fp32 can judge {found.images} of its sample images, and {found.least} prove it"


def _named(reasons: Mapping[str, str | None]) -> str:
    (name, reason), *others = reasons.items()
    return f"{name}: {reason}" + (f" (and {len(others)} more)" if others else "")
