"""Add a model to a line: `coserve experts add`.

Guarantees: each key of the new entry comes from the model's file or an option. Before any file is written, the expert
has judged an image, packed and run as in the agent. Its weights are in place before the line file names them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import textwrap
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agent.commands.adding.checking import checked, known_answers, opened, table_lines
from agent.commands.adding.facts import (
    Wishes,
    asked_for_function,
    asked_for_turned,
    entry_of,
    evidence_of,
    in_words,
    known_facts,
    missing_facts,
    refuse_other_labels,
    renamed_labels,
    with_names,
)
from agent.commands.proving import who
from agent.config import line_of
from agent.deployment.packed_copies import keep_proof
from agent.faults.errors import WeightsUnclear
from agent.line_file.editing import add_expert, append, content_of, created, edit_file
from agent.line_file.proofs import UNKNOWN_ANSWERS
from agent.runtime.images.sources import decoded
from experts.architectures import PLAIN
from experts.document import parse_document, read_document
from experts.errors import ConfigError, ExpertError, LoadError, WeightsRefused
from experts.expert import NOTHING_FOUND, Precision
from experts.filesystem import file_sha256, is_taken, whole_file
from experts.images import decode_image
from experts.model_files.formats import describe_file, served_suffix, write_weights
from experts.model_files.trainers import as_trained
from experts.packed.image_facts import KeptImageFacts
from experts.proving.answers import keep_answers
from experts.proving.judging import Judge
from experts.proving.search import DETAILS, SEARCH_S, Patience
from experts.thresholds.binding import threshold_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from agent.commands.adding.checking import ComparedEntry, GivenAnswers
    from agent.commands.progress import Report
    from agent.config import LineConfig
    from experts.expert import Expert, Prediction
    from experts.model_files.description import ModelDescription

FOLDERS: dict[str, str] = {"classifier": "cls", "detector": "det", "anomaly": "ano"}  # kind of id, and of weights
GOOD_LABELS = frozenset({"ok", "good", "pass"})
UNSUITED = re.compile(r"[^A-Za-z0-9_.-]+")  # in the id of an expert
COMMENT_WIDTH = 100
CHECKS = "checks"  # folder of known answers beside the line file
TRIAL = ": that shows only that it runs"
TRYING = "one of several that are tried"


@dataclass(frozen=True, slots=True)
class Tried:
    """The trial on one image; ``image``: its name in words."""

    image: str
    prediction: Prediction
    seconds: float
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """An expert that was added, or would be. ``entry``: its keys; ``lines``: the YAML of expert and routes.
    ``evidence``: by key. ``weights``: the file to serve; None if nothing was written."""

    expert: str
    kind: str
    entry: dict[str, Any]
    lines: str
    routes: tuple[str, ...]
    evidence: dict[str, str]
    remarks: tuple[str, ...]
    weights: Path | None
    sha256: str
    tried: Tried
    checked: ComparedEntry | None = None

    @property
    def judges(self) -> bool:
        """False for an anomaly expert without a threshold, whose answer means nothing yet."""
        return self.kind != "anomaly" or "threshold" in self.entry

    def as_json(self) -> dict[str, Any]:
        prediction = self.tried.prediction
        names = ("expert", "kind", "entry", "lines", "routes", "sha256")
        return {key: getattr(self, key) for key in names} | {
            "sure": self.evidence,
            "said": self.remarks,
            "weights": None if self.weights is None else str(self.weights),
            "tried": {
                "image": self.tried.image,
                "label": prediction.label if self.judges else None,
                "score": prediction.score if self.judges else None,
                "boxes": [box.as_json() for box in prediction.boxes],
                "outputs": [output.as_json() for output in prediction.outputs],
                "seconds": round(self.tried.seconds, 6),
            },
            "checked": None if self.checked is None else self.checked.as_json(),
            "unproven": UNKNOWN_ANSWERS if self.checked is None else None,
        }


def add_model(
    line: Path, file: Path, wishes: Wishes, progress: Report = lambda *_: None, patience: Patience | None = None
) -> Added:
    """Add a model's file to a line. After an error, no new file is left. Raises ConfigError, ImageError, WeightsError;
    WeightsUnclear names the missing facts. ``patience``: for a search by known answers."""
    content = content_of(line)
    described, check = describe_file(file, wishes.architecture, wishes.kind, wishes.detector), None
    if wishes.check is not None and "detector" in described.missing:
        wishes = _with_detector(line, file, described, wishes, progress)
        described = describe_file(file, wishes.architecture, wishes.kind, wishes.detector)
    if wishes.trainer is not None and described.kind != "detector":
        described = as_trained(described, wishes.trainer, wishes.size or described.size)
    if wishes.check is not None:
        others = parse_document(line, content).values.get("routes") or {}
        check = known_answers(wishes.check, wishes.components, others, wishes.labels or described.labels)
        check = replace(check, advises=wishes.detector_found != TRYING, patience=patience or Patience())
    images = [each for each in (wishes.image, *(() if check is None else (one.image for one in check.known))) if each]
    described = asked_for_function(asked_for_turned(described, images), wishes)
    if check is not None:
        described, check = opened(described, lambda key: getattr(wishes, key, None), check)
    settled = _Settled.of(line, described, wishes, content)
    text = content.decode("utf-8")
    settled.edited(text)  # its errors come before weights are read
    with _weights_for_trial(described, settled) as weights:
        compared = None if check is None else _compared(settled, weights, check, wishes.anyway, progress)
        settled = settled if compared is None else settled.having(compared, is_kept=not wishes.prints)
        on_trial = line_of(parse_document(line.absolute(), settled.on_trial(text, weights).encode()))
        expert, sha256 = on_trial.catalog.experts[settled.expert], file_sha256(weights)
        tried = _tried(expert, wishes.image)
        settled = settled.bound(threshold_of(expert, sha256))
        if not wishes.prints:
            in_place = put_in_place(weights, settled.weights, is_in_place=settled.is_in_place)
            with in_place, _answers_in_place(settled, check), created(line, content):
                edit_file(line, settled.edited)
            config = line_of(read_document(line))
            KeptImageFacts(config.packed_folder).keep(config.catalog.experts.values())
            if compared is not None:
                _keep_proof(config, settled.expert, sha256, compared)
    return Added(
        settled.expert, str(described.kind), settled.entry, settled.edited(""),
        wishes.components, settled.evidence, (*settled.remarks, *filter(None, [tried.remark])),
        None if wishes.prints else settled.weights, sha256, tried, compared,
    )  # fmt: skip


def _with_detector(line: Path, file: Path, described: ModelDescription, wishes: Wishes, progress: Report) -> Wishes:
    """Wishes with the one meaning of its boxes that gives the trainer's answers: each is tried with its own input.

    Raises WeightsUnclear for none and for several.
    """
    found: dict[str, str] = {}
    others: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in described.detectors:
        try:
            wish = replace(wishes, detector=name, detector_found=TRYING, anyway=None, prints=True)
            share = Patience(seconds=SEARCH_S / len(described.detectors))
            added = add_model(line, file, wish, progress, share)
            found[name] = added.checked.text if added.checked is not None else ""
        except WeightsUnclear as error:
            others[name] = error.missing.get("check", "asked for more")
            missing |= {} if "check" in error.missing else error.missing
        except ExpertError as error:
            others[name] = error.message.splitlines()[0]
        except ConfigError as error:  # an option that this kind does not take
            others[name] = str(error).splitlines()[0]
    if len(found) != 1:
        listed = "; ".join(f"{name}: {text}" for name, text in (found or others).items()) or "none was tried"
        why = f"add images that tell them apart: {listed}" if found else f"none gives the trainer's answers: {listed}"
        raise WeightsUnclear(str(file), {"detector": described.missing["detector"], **missing, "check": why})
    ((name, text),) = found.items()
    rest = f"; not with {', '.join(others)}" if others else ""
    return replace(wishes, detector=name, detector_found=f"found by --check: {text}{rest}")


@dataclass(frozen=True, slots=True)
class _Settled:
    """An expert with all facts known. ``is_in_place``: served from its present path. ``found``: remarks on its file."""

    line: Path
    expert: str
    entry: dict[str, Any]
    step: dict[str, Any]
    components: tuple[str, ...]
    evidence: dict[str, str]
    weights: Path
    is_in_place: bool
    source: str
    found: tuple[str, ...]

    @classmethod
    def of(cls, line: Path, described: ModelDescription, wishes: Wishes, content: bytes) -> _Settled:
        """Raises WeightsUnclear with all missing facts, and ConfigError for what contradicts the file."""
        wishes = with_names(described, wishes)
        refuse_other_labels(described, wishes)
        states_fit = described.kind == "detector" and "fit" not in described.missing
        is_yolo = states_fit and described.architecture != "onnx"
        is_left = wishes.fit == "stretched" and wishes.resample != "opencv-linear"  # to what the detector states
        if states_fit and (
            wishes.trainer or (wishes.resample and not wishes.fit) or is_left or (wishes.fit and is_yolo)
        ):
            raise ConfigError(
                "--fit, --resample and --trainer are not for detectors, which state their own: leave them out; a graph "
                "whose images other code prepares takes --fit with `pad`, or --fit stretched --resample opencv-linear"
            )
        if is_yolo and wishes.normalize not in (None, described.normalize):
            raise ConfigError("--normalize is not for ultralytics' weights, which take pixels in [0, 1]: leave it out")
        known = known_facts(described, wishes)
        named = (*(known.labels or ()), *filter(None, [wishes.otherwise]))
        good = tuple(label for label in named if label.lower() in GOOD_LABELS)
        passing = wishes.passing or (good if len(good) == 1 else ())
        missing = missing_facts(described, known, wishes)
        if not wishes.components and not parse_document(line, content).values.get("routes"):
            missing["component"] = "the line has no routes yet: name with --component whose images the expert judges"
        elif wishes.components and known.labels and not passing:
            missing["pass"] = "no label clearly means a good part: --pass label,... with which a route goes on"
            if known.kind == "detector":
                missing["pass"] += f", or --pass {NOTHING_FOUND} if all labels are defects"
        if NOTHING_FOUND in passing and known.kind != "detector":
            raise ConfigError(f"--pass {NOTHING_FOUND} is for detectors, and {described.file} is none: name a label")
        if missing:
            raise WeightsUnclear(str(described.file), missing)
        expert = wishes.id or f"{FOLDERS[str(known.kind)]}/{expert_name(known.file)}"
        folder, file = line.absolute().parent, described.file.absolute()
        is_in_place = described.is_served_as_it_is and file.resolve().is_relative_to(folder.resolve())
        own = folder / "weights" / f"{expert}{served_suffix(described)}"
        weights = file.resolve() if is_in_place else own
        step: dict[str, Any] = {"expert": expert, "pass": list(passing)}
        if wishes.min_score is not None:
            step["min_score"] = wishes.min_score
        entry = entry_of(known, wishes, Path(os.path.relpath(weights, folder.resolve() if is_in_place else folder)))
        evidence = evidence_of(described, wishes)
        remarks = (*described.remarks, *renamed_labels(described, wishes))
        return cls(
            line, expert, entry, step, wishes.components, evidence, weights, is_in_place, described.file.name, remarks
        )

    def having(self, compared: ComparedEntry, *, is_kept: bool) -> _Settled:
        """The expert with what its known answers decided. ``is_kept``: they are kept beside the line."""
        kept = {"check": f"{CHECKS}/{self.expert}"} if is_kept else {}
        entry = {**compared.entry, "weights": self.entry["weights"], **kept}
        return replace(self, entry=entry, evidence={**self.evidence, **compared.found, "check": compared.text})

    def bound(self, evidence: str) -> _Settled:
        """The expert with the ``evidence`` of weights and input after its threshold."""
        entry: dict[str, Any] = {}
        for key, value in self.entry.items():
            entry |= {key: value, "threshold_of": evidence} if key == "threshold" else {key: value}
        return replace(self, entry=entry)

    def on_trial(self, text: str, weights: Path) -> str:
        """``edited`` with the weights on trial, and with a threshold if an anomaly expert lacks one."""
        entry = {**self.entry, "weights": str(weights)}
        return replace(self, entry={"threshold": 0.0, **entry} if self.lacks_threshold else entry).edited(text)

    @property
    def remarks(self) -> tuple[str, ...]:
        if "nothing_found" in self.entry and "check" not in self.entry:
            verify = f"coserve experts verify {self.line} {self.expert} --check DATA"
            need = "it is proven on images with and without defects"
            return (*self.found, f"every verdict is UNKNOWN until {need}: `{verify}`")
        if not self.lacks_threshold:
            return self.found
        learn = f"coserve experts threshold {self.line} {self.expert} --samples DATA"
        return (*self.found, f"the expert judges nothing without a threshold: learn it with `{learn}`")

    @property
    def lacks_threshold(self) -> bool:
        return self.entry.get("task") == "anomaly" and "threshold" not in self.entry

    def edited(self, text: str) -> str:
        """The line file's text with the expert, and its step at the end of its components' routes."""
        comment = "\n".join([f"Added from {self.source}.", *(f"{key}: {why}" for key, why in self.evidence.items())])
        wrapped = "\n".join(
            line for each in comment.splitlines() for line in textwrap.wrap(each, COMMENT_WIDTH, subsequent_indent="  ")
        )
        text = add_expert(text, self.expert, self.entry, wrapped, file=self.line)
        for component in self.components:
            text = append(text, ("routes", component), self.step, file=self.line)
        return text


def expert_name(file: Path) -> str:
    """Name of an expert by its file."""
    stem = file.stem.removesuffix(".pth")  # of a .pth.tar
    return UNSUITED.sub("-", stem.replace("..", ".")).strip("-.") or "model"


@contextmanager
def _weights_for_trial(described: ModelDescription, settled: _Settled) -> Iterator[Path]:
    """A temporary file of the weights as they are served; the file itself if it is served in place."""
    if settled.is_in_place:
        yield settled.weights
        return
    try:
        with tempfile.TemporaryDirectory(prefix="coserve-add-") as folder:
            candidate = Path(folder) / f"weights{settled.weights.suffix}"
            write_weights(described, candidate)
            yield candidate
    except OSError as error:
        raise LoadError(str(described.file), f"cannot be added: {error}") from error


@contextmanager
def put_in_place(weights: Path, served: Path, *, is_in_place: bool) -> Iterator[None]:
    """Weights at the path for the line file; removed after an error. Raises ConfigError for other weights there."""
    if is_in_place or served.exists():
        if not is_in_place and file_sha256(served) != file_sha256(weights):
            there = f"{served} exists already, and is another file"
            raise ConfigError(f"{there}: choose another --id, or remove that file")
        yield
        return
    served.parent.mkdir(parents=True, exist_ok=True)
    with weights.open("rb") as file, whole_file(served, has_rivals=True) as final:
        shutil.copyfileobj(file, final)
    try:
        yield
    except BaseException:
        served.unlink(missing_ok=True)
        raise


def _compared(
    settled: _Settled, weights: Path, check: GivenAnswers, anyway: str | None, progress: Report
) -> ComparedEntry:
    found = checked(settled.expert, {**settled.entry, "weights": str(weights)}, settled.evidence, check, progress)
    if found.refusal and anyway is None:
        raise WeightsRefused(settled.expert, found.refusal)
    return replace(found, trusted=(who(), str(anyway))) if found.refusal else found


def _keep_proof(config: LineConfig, expert: str, sha256: str, compared: ComparedEntry) -> None:
    try:
        keep_proof(config, expert, (Precision.FP32, sha256), compared.comparison, compared.trusted or (who(), ""))
    except OSError as error:
        place = error.filename or config.state
        advice = f"{expert} is added; run `coserve experts verify {config.document.file} {expert}` as the agent's user"
        raise ConfigError(f"{place}: {error.strerror} - {advice}") from error


@contextmanager
def _answers_in_place(settled: _Settled, check: GivenAnswers | None) -> Iterator[None]:
    """Known answers beside the line file; removed after an error."""
    if check is None:
        yield
        return
    folder = settled.line.absolute().parent / CHECKS / settled.expert
    if is_taken(folder):
        raise ConfigError(f"{folder} exists already: choose another --id, or remove that folder")
    try:
        keep_answers(check.known, folder)
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _tried(expert: Expert, file: Path | None) -> Tried:
    pixels = expert.pixels
    if file is None:
        image = decoded(_synthetic(pixels.height, pixels.width), "")
        name = f"a synthetic image of {pixels.height}x{pixels.width}"
    else:
        image, name = decode_image(file, str(file)), str(file)
    judge = Judge(expert)
    started_s = time.perf_counter()
    prediction = judge.answer(image)
    return Tried(name, prediction, time.perf_counter() - started_s, judge.remark)


def _synthetic(height: int, width: int) -> NDArray[np.uint8]:
    image = np.random.default_rng(0).integers(0, 24, (height, width, 3))
    image += np.linspace(40, 160, width, dtype=np.int64)[None, :, None]
    image[height // 3 : height // 2, width // 3 : width // 2] += 70
    return image.clip(0, 255).astype(np.uint8)


def page_lines(line: Path, file: Path, added: Added) -> list[str]:
    entry, prediction = added.entry, added.tried.prediction
    fit = entry["input"].get("fit", "stretched")
    values: dict[str, Any] = {"task": "multiclass", "orientation": "stored", "variant": PLAIN, "fit": fit, **DETAILS}
    values |= {**entry, **entry["input"]}
    if "window" in values:
        values["window"] = " to ".join(map(str, values["window"]))
    counted = "one label" if len(entry["labels"]) == 1 else f"{len(entry['labels'])} labels"
    what = "an anomaly model" if added.kind == "anomaly" else f"a {added.kind} of {counted}"
    lines = [f"{file}: {entry['architecture']}, {what}"]
    lines += [f"  {key:<13}{in_words(values[key]):<24} {why}" for key, why in added.evidence.items() if key in values]
    lines += [f"  {each}" for each in added.remarks]
    answer = f"{prediction.label} {prediction.score:.3f}" if added.judges else "it answers,"
    if prediction.outputs:
        answer += f" ({', '.join(f'{each.label} {each.score:.3f}' for each in prediction.outputs)})"
    lines.append(f"tried on {added.tried.image}: {answer} in {added.tried.seconds:.3f} s{TRIAL}")
    if added.checked is not None:
        lines += [added.checked.heading, *(f"  {each}" for each in table_lines(added.checked.comparison))]
    where = ", ".join([f"experts.{added.expert}", *(f"routes.{component}" for component in added.routes)])
    if added.weights is None:
        return [*lines, f"nothing was written; {line} would get {where}:"]
    if added.checked is None:
        give = f"`coserve experts verify {line} {added.expert} --check DATA`"
        lines.append(f"unproven: {UNKNOWN_ANSWERS} - give them with {give}")
    return [*lines, f"{added.weights}: sha256 {added.sha256}", f"{line}: {where}"]
