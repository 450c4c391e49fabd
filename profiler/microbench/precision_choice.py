"""Form of each expert on each processor (``precision: auto``): the fastest that is proven for the expert.

An expert's outputs prove a form in fp32's numbers (``same_numbers``), its own samples any form (``agreement``). Forms
that are clearly faster than fp32 are tried, fastest first, and again once weights, samples, thresholds or routes have
changed; experts without a proof run in fp32. Experts that share tensors run in one form, proven for all of them: a
second form would hold the tensors twice. A form of the line file is taken without proof, as by the agent. A kind that
runs in no permitted form is not served on the processor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.deployment.profile_in_use import precision_of
from agent.device_profile.identity import packed_sha256, verdict_sha256
from agent.device_profile.records import ExpertForm
from agent.runtime.expert_copy import by_kind
from experts.backends.forms import form_of, runs_as
from experts.expert import Precision
from experts.sizes import mib
from profiler.microbench import agreement, same_numbers
from profiler.microbench.agreement import candidate_precisions, compare, image_s, is_clearly_faster, terms_sha256
from profiler.microbench.same_numbers import compare_outputs, trial_sha256
from profiler.microbench.texts import TEXTS_SHA256, compare_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.config import LineConfig
    from agent.device_profile.records import Agreement, KindProfile
    from agent.device_profile.store import ProfileDraft
    from agent.runtime.expert_copy import ExpertCopy
    from profiler.microbench.bench import Bench
    from profiler.microbench.packed_forms import LinePacking

EXACT = "nothing that was measured is clearly faster"  # ExpertForm.why
GIVE_MORE = " - give --samples FOLDER with more good and bad parts of its components"
COMPARED_FRACTION = 0.8  # of the free memory, for an fp32 copy to compare with


@dataclass(frozen=True, slots=True)
class Forms:
    """Chosen forms by (kind, processor), and each expert's own by (expert, processor), as in ``StoredProfile``."""

    kinds: dict[tuple[str, str], str]
    experts: dict[tuple[str, str], ExpertForm]

    def of(self, copy: ExpertCopy, processor: str) -> str | None:
        own = self.experts.get((copy.expert.id, processor))
        return self.kinds.get((copy.kind, processor)) if own is None else own.precision


@dataclass(slots=True)
class PrecisionChoice:
    """Choice of one profiling run; comparisons are saved in the draft.

    ``notes``: reasons of experts that stay in the reference or are left off a processor.
    """

    config: LineConfig
    packing: LinePacking
    draft: ProfileDraft
    tolerance: float
    progress: Callable[[str, int, int], None]
    notes: list[str] = field(default_factory=list)

    def forget_changed(self, references: Sequence[ExpertCopy]) -> None:
        """Invalidate agreements of experts that are new or have other weights."""
        then = self.draft.packed()
        now = {(copy.expert.id, str(copy.packed.precision)): packed_sha256(copy.packed) for copy in references}
        changed = {name for (name, form), digest in now.items() if then.get((name, form)) != digest}
        for each in self.draft.agreements():
            if each.expert in changed:
                self.draft.save_agreement(replace(each, images=0))
        self.draft.save_packed({**then, **now})  # last: killed before, a run invalidates again

    def on(self, benches: Sequence[Bench], references: Sequence[ExpertCopy]) -> Forms:
        """Form of each expert on each bench's processor; a kind that may not run on one is left off it."""
        chosen, measured = Forms({}, {}), self.draft.kinds()
        for bench in benches:
            for kind, listed in by_kind(references).items():
                profiles = [each for each in measured if (each.kind, each.processor) == (kind, bench.processor)]
                if not profiles:
                    continue
                if listed[0].expert.precision or self.config.precision_beside(listed[0].expert):
                    form = self._given(bench, profiles, listed)
                else:
                    form, own = self._fastest_that_are_proven(bench, profiles, listed)
                    chosen.experts.update({(each.expert, each.processor): each for each in own})
                if form is not None:
                    chosen.kinds[kind, bench.processor] = form
        return chosen

    def _given(self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]) -> str | None:
        form = precision_of(self.config, references[0].expert.id, bench.processor, None, None)
        if runs_as(form) is not form:
            absent = form_of(form)
            note = f"{references[0].kind} on {bench.processor} runs in {absent.plain}, not in {form}"
            reason = absent.why_absent()
            self.notes.append(f"{note}, which does not run on this CPU: {reason}; write `precision: auto`")
            form = absent.plain
        if form_of(form).needs_calibration:
            form = self._given_calibrated(bench, form, references)
        if any(profile.precision == form for profile in profiles):
            if not form_of(form).is_automatic:
                self._tell_uncompared(bench, references)
            return str(form)
        self._left_off(
            profiles[0], f"it does not run in {form}, which the line file gives - write `precision: auto`, or another"
        )
        return None

    def _given_calibrated(self, bench: Bench, form: Precision, references: Sequence[ExpertCopy]) -> Precision:
        """Form of the kind; experts without calibration run in its plain form, as on the agent, and are noted."""
        plain = form_of(form).plain
        without = {
            copy.expert.id: self.packing.why_not_calibrated(copy.expert.id, form)
            for copy in references
            if self.packing.runs_in(copy.expert.id, form) is not form
        }
        if without:
            note = f"{len(without)} of the {len(references)} experts of {references[0].kind} on {bench.processor}"
            self.notes.append(f"{note} run in {plain}, not in {form}: {_named(without)}")
        return plain if len(without) == len(references) else form

    def _tell_uncompared(self, bench: Bench, references: Sequence[ExpertCopy]) -> None:
        exact = self._in_form(bench, Precision.FP32, references)
        largest_bytes = max((copy.footprint.total_bytes for copy in exact), default=0)
        pool = bench.box.pool_of(bench.processor)
        if exact and largest_bytes <= COMPARED_FRACTION * bench.box.size_of(pool).available_bytes:
            for each in self._compare_texts(bench, exact, references):
                self.draft.save_agreement(each)
            return
        reason = f"in fp32 it takes {mib(largest_bytes)}" if exact else "it cannot be packed in fp32"
        self.notes.append(f"{references[0].kind} on {bench.processor} is not compared with fp32: {reason}")

    def _in_form(self, bench: Bench, form: Precision, references: Sequence[ExpertCopy]) -> list[ExpertCopy]:
        wanted = {copy.expert.id: {form} for copy in references}
        packed = self.packing.pack(wanted, f"pack {form} for {bench.processor}: {references[0].kind}")
        return [copy for copy in packed[form] if copy.expert.id in wanted]

    def _compare_texts(self, bench: Bench, fp32: Sequence[ExpertCopy], others: Sequence[ExpertCopy]) -> list[Agreement]:
        found, note = compare_texts(bench, fp32, others, self.tolerance)
        form = others[0].packed.precision
        self.notes.append(f"{fp32[0].kind} in {form} on {bench.processor} against fp32: {note}")
        return found

    def _fastest_that_are_proven(
        self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]
    ) -> tuple[str | None, list[ExpertForm]]:
        """Form of experts without one of their own, None where none is permitted; and each expert's form."""
        self._tell_untried(bench, profiles, references)
        exact = next((each for each in profiles if each.precision == Precision.FP32), None)
        faster = [each for each in sorted(profiles, key=image_s) if exact is None or is_clearly_faster(each, exact)]
        proofs: dict[str, str] = {}
        whys: dict[str, str] = {}  # of experts that are not in the fastest form
        found: dict[str, Precision] = {}
        for form in (Precision(each.precision) for each in faster):
            left = [group for group in _groups(references) if group[0].expert.id not in found]
            asked = [copy for group in left for copy in group]
            refuted, proven = self._refuted(bench, form, asked, profiles) if asked else ({}, {})
            proofs |= proven
            for names in ([copy.expert.id for copy in group] for group in left):
                reasons = {name: refuted[name] for name in names if name in refuted}
                if not reasons:
                    found |= dict.fromkeys(names, form)
                    continue
                first, reason = next(iter(reasons.items()))
                for name in names:
                    note = reasons.get(name, f"it shares tensors with {first}, of which {reason}")
                    whys.setdefault(name, f"not in {form}: {note}")
        if exact is not None:
            found = {copy.expert.id: Precision.FP32 for copy in references} | found
        if not found:
            self._left_off(profiles[0], "fp32 does not run there, and no other precision is proven to agree with it")
        elif whys:
            note = f"{len(whys)} of the {len(references)} experts of {profiles[0].kind} on {bench.processor}"
            self.notes.append(f"{note} stay behind the fastest form: {_named(whys)}")
        own = [
            ExpertForm(
                expert=name,
                processor=bench.processor,
                kind=copy.kind,
                precision=found[name],
                why=whys.get(name) or proofs.get(name, EXACT),
                verdict_sha256=verdict_sha256(self.config.catalog.graph, copy.expert),
            )
            for copy in references
            if (name := copy.expert.id) in found
        ]
        return (None if exact is None else exact.precision), own

    def _refuted(
        self, bench: Bench, form: Precision, references: Sequence[ExpertCopy], profiles: Sequence[KindProfile]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Experts that a form is not proven for, and why; and the proofs of the others.

        A form in fp32's numbers is proven by outputs. If it is not, or in other numbers, samples prove it; where they
        have been compared before, outputs are not asked again.
        """
        if not form_of(form).has_numbers_of_fp32:
            return self._refuted_by(bench, form, references, None)
        largest = min((each.max_batch for each in profiles if each.precision in (form, Precision.FP32)), default=1)
        known = {(each.expert, each.processor, each.precision): each for each in self.draft.agreements()}

        def is_by_samples(copy: ExpertCopy) -> bool:
            there = known.get((copy.expert.id, bench.processor, form))
            return there is not None and (there.tolerance, there.of_sha256) == self._terms(bench, copy, None)

        fresh = [copy for copy in references if not is_by_samples(copy)]
        refuted, proofs = self._refuted_by(bench, form, fresh, largest)
        left = [copy for copy in references if copy.expert.id not in proofs]
        unsampled, further = self._refuted_by(bench, form, left, None)
        whys = {name: f"{refuted[name]}; {why}" if name in refuted else why for name, why in unsampled.items()}
        return whys, proofs | further

    def _refuted_by(
        self, bench: Bench, form: Precision, references: Sequence[ExpertCopy], outputs: int | None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """``outputs``: the largest batch to compare outputs of; None: verdicts on samples are compared."""
        if form_of(form).needs_calibration:
            bench = replace(bench, samples=bench.samples.held_out())
        known = {(each.expert, each.processor, each.precision): each for each in self.draft.agreements()}
        refuted: dict[str, str] = {}
        found: list[Agreement] = []
        missing: list[ExpertCopy] = []
        for copy in references:
            name = copy.expert.id
            there = known.get((name, bench.processor, form))
            terms = self._terms(bench, copy, outputs)
            if outputs is None and (reason := self._too_few(bench, form, copy)) is not None:
                refuted[name] = reason
            elif there is not None and there.images and (there.tolerance, there.of_sha256) == terms:
                found.append(there)
            else:
                refuted[name] = "fp32 itself judges none of its samples" if outputs is None else "it cannot be compared"
                missing.append(copy)
        others = self._in_form(bench, form, missing) if missing else []
        lying = {copy.expert.id for copy in others}
        refuted |= {copy.expert.id: "it cannot be packed in it" for copy in missing if copy.expert.id not in lying}
        asked = [copy for copy in missing if copy.expert.id in lying]
        found += self._compared(bench, form, asked, others, outputs)
        proven = [each for each in found if each.proves]
        refuted |= {each.expert: _refutation(each, outputs is not None) for each in found if not each.proves}
        proofs = _proofs(proven, outputs is not None)
        return {name: why for name, why in refuted.items() if name not in proofs}, proofs

    def _terms(self, bench: Bench, copy: ExpertCopy, outputs: int | None) -> tuple[float, str]:
        """Tolerance and digest of a comparison: with others it is made again."""
        if copy.expert.takes_texts:
            return self.tolerance, TEXTS_SHA256
        if outputs is not None:
            return same_numbers.MOST, trial_sha256(bench.samples, copy.expert)
        return self.tolerance, terms_sha256(bench.samples, self.config.catalog.graph, copy.expert)

    def _too_few(self, bench: Bench, form: Precision, copy: ExpertCopy) -> str | None:
        """Reason why the expert's samples prove no form."""
        name, least = copy.expert.id, agreement.LEAST_IMAGES
        images = len(bench.samples.of(name))
        if not copy.expert.takes_texts and images < least:
            return f"it has {images or 'no'} sample images for that, and a proof takes {least}{GIVE_MORE}"
        return self.packing.why_not_calibrated(name, form) if form_of(form).needs_calibration else None

    def _compared(
        self,
        bench: Bench,
        form: Precision,
        references: Sequence[ExpertCopy],
        others: Sequence[ExpertCopy],
        outputs: int | None,
    ) -> list[Agreement]:
        if not references:
            return []
        stage = f"compare {form} on {bench.processor}: {references[0].kind}"
        self.progress(stage, 0, 1)
        if references[0].expert.takes_texts:
            found = self._compare_texts(bench, references, others)
        elif outputs is not None:
            found = compare_outputs(bench, references, others, outputs)
        else:
            found = compare(bench, self.config.catalog.graph, references, others, self.tolerance)
        for each in found:
            self.draft.save_agreement(each)
        self.progress(stage, 1, 1)
        return found

    def _tell_untried(self, bench: Bench, profiles: Sequence[KindProfile], references: Sequence[ExpertCopy]) -> None:
        kind = profiles[0]
        name = next((copy.expert.id for copy in references if bench.samples.of(copy.expert.id)), None)
        for form in candidate_precisions(kind.architecture, bench.processor):
            is_timed = any(profile.precision == form for profile in profiles)
            if name is None or is_timed or not form_of(form).needs_calibration:
                continue
            if (reason := self.packing.why_not_calibrated(name, form)) is not None:
                self.notes.append(f"{kind.kind} on {bench.processor} is not run in {form}: {name}: {reason}")

    def _left_off(self, profile: KindProfile, reason: str) -> None:
        self.notes.append(f"{profile.kind} is not run on {profile.processor}: {reason}")


def _refutation(found: Agreement, is_of_outputs: bool) -> str:
    if is_of_outputs:
        what = "are no numbers" if found.labels_differ else f"differ by {found.largest_score_difference:.1e}"
        return f"its outputs {what}, and {same_numbers.MOST:.0e} is allowed"
    if found.labels_differ:
        return f"{found.labels_differ} of {found.images} samples are decided otherwise"
    if not found.agrees:
        return f"its scores differ by {found.largest_score_difference:.3f}"
    seen = f"fp32 passes {found.passing} of its sample images and fails {found.failing}"
    return f"{seen}, and {found.least} prove it, {found.least_each} of either{GIVE_MORE}"


def _proofs(proven: Sequence[Agreement], is_of_outputs: bool) -> dict[str, str]:
    """Proof of each expert, as text. That of outputs has the largest difference of all, so that they read alike."""
    if is_of_outputs:
        largest = max((each.largest_score_difference for each in proven), default=0.0)
        text = f"in the same numbers, proven by outputs (largest difference {largest:.1e})"
        return {each.expert: text for each in proven}
    return {each.expert: _proof(each) for each in proven}


def _proof(agreed: Agreement) -> str:
    if not agreed.least_each:  # texts, which pass or fail nothing
        return f"{agreed.images} samples agree: at 95 % fewer than {3 / agreed.images:.1%} are decided otherwise"
    return (
        f"{agreed.passing} samples that fp32 passes and {agreed.failing} that it fails agree: at 95 % fewer than "
        f"{3 / agreed.passing:.1%} and {3 / agreed.failing:.1%} are decided otherwise"
    )


def _groups(references: Sequence[ExpertCopy]) -> list[list[ExpertCopy]]:
    found: list[tuple[set[str], list[ExpertCopy]]] = []
    for copy in references:
        held, together = {segment.sha256 for segment in copy.packed.shared}, [copy]
        for group in [each for each in found if each[0] & held]:
            found.remove(group)
            held, together = held | group[0], [*group[1], *together]
        found.append((held, together))
    return [together for _, together in found]


def _named(reasons: Mapping[str, str | None]) -> str:
    (name, reason), *others = reasons.items()
    return f"{name}: {reason}" + (f" (and {len(others)} more)" if others else "")
