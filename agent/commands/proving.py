"""Proofs of a line's experts, also beside a running agent: experts that lack one, and comparisons anew."""

from __future__ import annotations

import os
import pwd
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.deployment.packed_copies import keep_proof, packed_manifests
from agent.line_file.editing import edit_file, set_key
from agent.line_file.proofs import kept_proofs, proven, text_of_lacks
from experts.calibrations import CalibrationFolder
from experts.errors import ConfigError, CoServeError, ExpertError, LoadError
from experts.packed.sources import sha256_of, stamp_of
from experts.proving.answers import keep_answers, read_answers
from experts.proving.comparing import answers_of, require_comparable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from agent.config import LineConfig
    from agent.line_file.proofs import Lack, Proof
    from experts.expert import Expert, Precision
    from experts.packed.manifests import Manifest
    from experts.proving.comparing import AnswerComparison

WORST = 3  # images of a comparison that are named
ACCELERATED = ("cuda", "mps")


def served_forms(config: LineConfig) -> dict[str, set[tuple[Precision, str]]]:
    """Forms that an agent of this line would run each expert in on this box, with torch's device for each."""
    from agent.deployment.build import AS_SERVED, deployment_of  # loads torch

    forms: defaultdict[str, set[tuple[Precision, str]]] = defaultdict(set)
    for processor, column in deployment_of(config, config.packed_folder, AS_SERVED).precisions.items():
        for name, form in column.items():
            forms[name].add((form, processor if processor in ACCELERATED else "cpu"))
    return forms


def unproven_line(config: LineConfig) -> dict[str, Lack]:
    """Experts without a proof in each of these forms, and why. Hashes weights that are not packed."""
    proofs = kept_proofs(config.state)
    forms: dict[str, set[tuple[str, str]]] = {}
    if proofs:
        manifests, served = packed_manifests(config), {}
        with suppress(ConfigError):  # not the line's box: no form is known to run
            served = served_forms(config)
        for name, found in served.items():
            with suppress(ExpertError):  # without its weights nothing is proven
                sha256 = _sha256_of(config.catalog.experts[name], manifests[name])
                forms[name] = {(form, sha256) for form, _ in found}
    return proven(config.catalog.experts.values(), forms, proofs, config.packed_folder).lacks


def text_of_unproven(config: LineConfig, lacks: Mapping[str, Lack]) -> str | None:
    """One line about experts without proof; None if there are none."""
    count = sum(not expert.takes_texts for expert in config.catalog.experts.values())
    return f"{len(lacks)} of {count} experts are unproven ({text_of_lacks(lacks)})" if lacks else None


@dataclass(frozen=True, slots=True)
class Verified:
    """An expert, compared in one form."""

    proof: Proof
    comparison: AnswerComparison

    def as_json(self) -> dict[str, Any]:
        worst = [{"image": row.known.image.name, "why": row.why} for row in self.comparison.worst(WORST)]
        return self.proof.model_dump(mode="json") | {"holds": self.proof.holds, "worst": worst}

    @property
    def lines(self) -> list[str]:
        found = f"{self.proof.text}, largest difference of a score {self.proof.difference:.4f}"
        return [found, *(f"  {row.known.image.name}: {row.why}" for row in self.comparison.worst(WORST))]


def verify_experts(
    config: LineConfig, names: Iterable[str], progress: Callable[[str, int, int], None]
) -> Iterator[tuple[str, list[Verified] | str]]:
    """Compare experts that have known answers with them, in each form that an agent would run; keep the proofs.

    Each answers for itself: a text instead says why one could not be compared. Raises ConfigError for the line alone.
    """
    experts = [config.catalog.experts[name] for name in names if config.catalog.experts[name].check is not None]
    forms = served_forms(config) if experts else {}
    for number, expert in enumerate(experts, start=1):
        try:
            yield expert.id, [_verified(config, expert, *form) for form in sorted(forms.get(expert.id, ()))]
        except (CoServeError, OSError) as error:
            yield expert.id, str(error)
        progress("verify answers", number, len(experts))


def give_answers(line: Path, config: LineConfig, expert: str, data: Path) -> None:
    """Keep a trainer's answers beside the line file, as the ``check`` of an expert. Raises ConfigError."""
    known = read_answers(data, config.catalog.components, config.catalog.experts[expert].labels)
    require_comparable(config.catalog.experts[expert], known, str(data))
    place = f"checks/{expert}"
    try:
        keep_answers(known, line.absolute().parent / place)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror} - remove that folder, or write there") from error
    edit_file(line, lambda text: set_key(text, ("experts", expert, "check"), place, file=line))


def _verified(config: LineConfig, expert: Expert, form: Precision, device: str) -> Verified:
    from experts.proving.judging import compared  # loads torch

    known = answers_of(expert, config.catalog.components)
    stamp, sha256 = stamp_of(expert), sha256_of(expert)
    calibration = CalibrationFolder.beside(config.packed_folder).path(expert.id)
    comparison = compared(replace(expert, calibration=calibration), known, form, device)
    if stamp_of(expert) != stamp:
        raise LoadError(expert.id, f"{expert.weights} was written meanwhile: verify it again")
    try:
        proof = keep_proof(config, expert.id, (form, sha256), comparison, (who(), ""))
    except OSError as error:
        place = error.filename or config.state
        raise ConfigError(f"{place}: {error.strerror} - run this as the agent's user") from error
    return Verified(proof, comparison)


def _sha256_of(expert: Expert, manifests: Iterable[Manifest]) -> str:
    """Raises LoadError, WeightsMissing."""
    stamp = stamp_of(expert)
    return next((each.source.sha256 for each in manifests if each.source.stamp == stamp), None) or sha256_of(expert)


def who() -> str:
    """Name of this user of the machine."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
