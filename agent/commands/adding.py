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

from agent.commands.checking import checked, known_answers, opened, table_lines, who
from agent.config import line_of
from agent.deployment.packed_copies import keep_proof
from agent.line_file.editing import add_expert, append, content_of, created, edit_file, rendered
from agent.line_file.proofs import UNKNOWN_ANSWERS
from agent.runtime.images.sources import decoded
from experts.architectures import PLAIN
from experts.document import parse_document, read_document
from experts.errors import ConfigError, ExpertError, LoadError, WeightsRefused, WeightsUnclear
from experts.expert import NOTHING_FOUND, Precision
from experts.filesystem import file_sha256, is_taken, whole_file
from experts.images import decode_image, is_turned
from experts.labels import moved, renamed
from experts.model_files.description import FIT_OPTIONS, NO_RESAMPLER, in_grey
from experts.model_files.formats import describe_file, served_suffix, write_weights
from experts.model_files.trainers import as_trained
from experts.packed.image_facts import KeptImageFacts
from experts.proving.answers import keep_answers
from experts.proving.judging import Judge
from experts.proving.search import DETAILS, SEARCH_S, Patience
from experts.thresholds.binding import threshold_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from agent.commands.checking import ComparedEntry, GivenAnswers
    from agent.commands.progress import Report
    from agent.config import LineConfig
    from experts.expert import Expert, Prediction
    from experts.model_files.description import Kind, ModelDescription

FOLDERS: dict[str, str] = {"classifier": "cls", "detector": "det", "anomaly": "ano"}  # kind of id, and of weights
GOOD_LABELS = frozenset({"ok", "good", "pass"})
UNSUITED = re.compile(r"[^A-Za-z0-9_.-]+")  # in the id of an expert
KEYS = (
    "architecture",
    "detector",
    "suppression",
    "task",
    "labels",
    "otherwise",
    "size",
    "normalize",
    "fit",
    "orientation",
    "bits",
    "window",
    "stem",
    "variant",
)  # order of their lines
ONE_LABEL_OF_TWO = "one output is the probability of one label: --otherwise LABEL for the other case (ok, ng, ...)"
TURNED = (
    "{} has an EXIF orientation, and nothing says whether its trainer's loader applied it: --orientation exif "
    "(cv2.imread, transformers' load_image) or --orientation stored (Pillow's Image.open, timm, Keras)"
)
STORED = "nothing states it: pixels as the file has them; --orientation exif if its trainer's loader turned images"
COMMENT_WIDTH = 100
CHECKS = "checks"  # folder of known answers beside the line file
TRIAL = ": that shows only that it runs"
TRYING = "one of several that are tried"
LABELS_SHOWN = 8
LABELS_OF_FILE = 100  # of a file, if the line has other names


@dataclass(frozen=True, slots=True)
class Wishes:
    """Facts about a model from the user; None: as in its file. ``size``: (height, width).

    ``names``: the file's words for ``labels``, one by one. ``task``: "multiclass" or "multilabel"; for the latter
    ``otherwise`` is the label if none holds. ``components``: their routes get the expert; ``passing``: labels with
    which they go on. ``threshold``: of an anomaly expert, or of each label of a multilabel one. ``resample``: function
    that scales images; ``trainer``: see experts.model_files.trainers. ``check``: its trainer's answers; ``anyway``: why
    it is added even if they differ. ``detector_found``: evidence of a ``detector`` that no option gave. ``prints``:
    write nothing.
    """

    id: str | None = None
    components: tuple[str, ...] = ()
    kind: Kind | None = None
    detector: str | None = None
    detector_found: str | None = None
    suppression: str | None = None
    architecture: str | None = None
    task: str | None = None
    labels: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    otherwise: str | None = None
    size: tuple[int, int] | None = None
    normalize: str | dict[str, Any] | None = None
    fit: str | dict[str, Any] | None = None
    resample: str | None = None
    orientation: str | None = None
    trainer: str | None = None
    bits: int | None = None
    window: tuple[int, int] | None = None
    variant: str | None = None
    passing: tuple[str, ...] | None = None
    min_score: float | None = None
    threshold: float | None = None
    image: Path | None = None
    check: Path | None = None
    anyway: str | None = None
    prints: bool = False


@dataclass(frozen=True, slots=True)
class Tried:
    """The trial on one image; ``image``: its name in words."""

    image: str
    prediction: Prediction
    seconds: float
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """An expert that was added, or would be. ``entry``: its keys; ``lines``: the YAML of expert and routes. ``sure``:
    evidence by key. ``weights``: the file to serve; None if nothing was written."""

    expert: str
    kind: str
    entry: dict[str, Any]
    lines: str
    routes: tuple[str, ...]
    sure: dict[str, str]
    said: tuple[str, ...]
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
        names = ("expert", "kind", "entry", "lines", "routes", "sure", "said", "weights", "sha256")
        return {key: getattr(self, key) for key in names} | {
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
    described = _asked_for_function(_asked_for_turned(described, images), wishes)
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
            with _put_in_place(weights, settled), _answers_in_place(settled, check), created(line, content):
                edit_file(line, settled.edited)
            config = line_of(read_document(line))
            KeptImageFacts(config.packed_folder).keep(config.catalog.experts.values())
            if compared is not None:
                _keep_proof(config, settled.expert, sha256, compared)
    return Added(
        settled.expert, str(described.kind), settled.entry, settled.edited(""),
        wishes.components, settled.sure, (*settled.said, *filter(None, [tried.remark])),
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
    sure: dict[str, str]
    weights: Path
    is_in_place: bool
    source: str
    found: tuple[str, ...]

    @classmethod
    def of(cls, line: Path, described: ModelDescription, wishes: Wishes, content: bytes) -> _Settled:
        """Raises WeightsUnclear with all missing facts, and ConfigError for what contradicts the file."""
        wishes = _with_names(described, wishes)
        _refuse_other_labels(described, wishes)
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
        known = _known(described, wishes)
        named = (*(known.labels or ()), *filter(None, [wishes.otherwise]))
        good = tuple(label for label in named if label.lower() in GOOD_LABELS)
        passing = wishes.passing or (good if len(good) == 1 else ())
        missing = _missing_facts(described, known, wishes)
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
        stem = known.file.stem.removesuffix(".pth")  # of a .pth.tar
        name = UNSUITED.sub("-", stem.replace("..", ".")).strip("-.") or "model"
        expert = wishes.id or f"{FOLDERS[str(known.kind)]}/{name}"
        folder, file = line.absolute().parent, described.file.absolute()
        is_in_place = described.is_served_as_it_is and file.resolve().is_relative_to(folder.resolve())
        own = folder / "weights" / f"{expert}{served_suffix(described)}"
        weights = file.resolve() if is_in_place else own
        step: dict[str, Any] = {"expert": expert, "pass": list(passing)}
        if wishes.min_score is not None:
            step["min_score"] = wishes.min_score
        entry = _entry(known, wishes, Path(os.path.relpath(weights, folder.resolve() if is_in_place else folder)))
        sure = _evidence(described, wishes)
        said = (*described.said, *_renamed(described, wishes))
        return cls(line, expert, entry, step, wishes.components, sure, weights, is_in_place, described.file.name, said)

    def having(self, compared: ComparedEntry, *, is_kept: bool) -> _Settled:
        """The expert with what its known answers decided. ``is_kept``: they are kept beside the line."""
        kept = {"check": f"{CHECKS}/{self.expert}"} if is_kept else {}
        entry = {**compared.entry, "weights": self.entry["weights"], **kept}
        return replace(self, entry=entry, sure={**self.sure, **compared.found, "check": compared.text})

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
    def said(self) -> tuple[str, ...]:
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
        comment = "\n".join([f"Added from {self.source}.", *(f"{key}: {why}" for key, why in self.sure.items())])
        wrapped = "\n".join(
            line for each in comment.splitlines() for line in textwrap.wrap(each, COMMENT_WIDTH, subsequent_indent="  ")
        )
        text = add_expert(text, self.expert, self.entry, wrapped, file=self.line)
        for component in self.components:
            text = append(text, ("routes", component), self.step, file=self.line)
        return text


def _known(described: ModelDescription, wishes: Wishes) -> ModelDescription:
    kind, keys = (
        described.kind or wishes.kind,
        ("task", "labels", "size", "normalize", "orientation", "variant", "resample"),
    )
    taken = {key: getattr(wishes, key) or getattr(described, key) for key in keys}
    known = replace(described, kind=kind, fit=_fit(described, wishes), **taken)
    return replace(known, normalize=in_grey(known.normalize)) if described.is_grey else known


def _fit(described: ModelDescription, wishes: Wishes) -> str | dict[str, Any] | None:
    """The fit with the function that scales; None where either is not known."""
    fit = described.fit if wishes.fit is None else wishes.fit
    given, found = (each if isinstance(each, dict) else {} for each in (fit, described.fit))
    own = given.get("interpolation") if wishes.fit is not None else None
    resample = wishes.resample or own or found.get("interpolation") or described.resample
    if fit is None or resample is None:
        return None
    rounding = {"rounding": described.rounding} if described.rounding and _is_cut(given) else {}
    whole = {**rounding, **given, "interpolation": resample}
    return "stretched" if whole == {"interpolation": "bilinear"} else whole


def _asked_for_turned(described: ModelDescription, images: Iterable[Path]) -> ModelDescription:
    """Ask for the orientation where it shows: nothing states it, and an image has one."""
    turned = next((each for each in images if is_turned(each)), None)
    if turned is None or described.orientation is not None or described.kind == "detector":
        return described
    return replace(described, missing={**described.missing, "orientation": TURNED.format(turned)})


def _asked_for_function(described: ModelDescription, wishes: Wishes) -> ModelDescription:
    """Ask for the function that scales alone, where the fit is known but for it."""
    if "fit" not in described.missing or (wishes.fit is None and described.fit is None):
        return described
    missing = {key: why for key, why in described.missing.items() if key != "fit"}
    return replace(described, missing=missing if _fit(described, wishes) else {**missing, "resample": NO_RESAMPLER})


def _is_cut(fit: str | dict[str, Any] | None) -> bool:
    return isinstance(fit, dict) and "resize" in fit


def _missing_facts(described: ModelDescription, known: ModelDescription, wishes: Wishes) -> dict[str, str]:
    missing = {key: why for key, why in described.missing.items() if getattr(known, key) is None}
    if wishes.fit is None and _is_cut(known.fit) and described.size not in {None, known.size}:
        found = f"{rendered(known.fit)} ({described.sure['fit']})"
        missing["fit"] = f"the file has {found}, for another size: {FIT_OPTIONS}"
    if known.task == "multilabel" and known.label_count == 1 and wishes.otherwise is None:
        missing["otherwise"] = ONE_LABEL_OF_TWO
    return missing


def _entry(known: ModelDescription, wishes: Wishes, weights: Path) -> dict[str, Any]:
    task, labels = "anomaly" if known.kind == "anomaly" else known.task, list(known.labels or ())
    words = labels if wishes.names is None else dict(zip(wishes.names, labels, strict=True))
    threshold, is_multilabel = wishes.threshold, known.task == "multilabel"
    entry: dict[str, Any] = {
        "architecture": known.architecture,
        "weights": weights.as_posix(),
        "detector": wishes.detector,
        "suppression": wishes.suppression,
        "task": None if task == "multiclass" else task,
        "labels": words,
        "otherwise": wishes.otherwise,
        "confidence": known.confidence,
        "nothing_found": "pass" if NOTHING_FOUND in (wishes.passing or ()) else None,
        "thresholds": dict.fromkeys(labels, threshold) if is_multilabel and threshold is not None else None,
        "threshold": None if is_multilabel else threshold,
        "input": {"size": list(known.size or ()), "normalize": known.normalize}
        | ({} if known.fit is None else {"fit": known.fit})
        | ({} if known.orientation is None else {"orientation": known.orientation})
        | ({} if wishes.bits is None else {"bits": wishes.bits})
        | ({} if wishes.window is None else {"window": list(wishes.window)}),
        "stem": known.stem,
        "variant": None if known.variant == PLAIN else known.variant,
    }
    return {key: value for key, value in entry.items() if value is not None}


def _evidence(described: ModelDescription, wishes: Wishes) -> dict[str, str]:
    """Evidence by key: the file, or an option, with the file's different value."""
    sure = dict(described.sure)
    for key in (
        *("task", "labels", "otherwise", "size", "normalize", "fit", "orientation"),
        *("bits", "window", "variant", "suppression"),
    ):
        given, found = getattr(wishes, key), getattr(described, key, None)
        if given is not None and found is not None and found != given:
            shown = _shown(list(found) if isinstance(found, tuple) else found, maximum=LABELS_OF_FILE)
            sure[key] = f"given by --{key}; the file has {shown} ({described.sure[key]})"
        elif given is not None:
            sure[key] = f"given by --{key}"
    if wishes.detector_found is not None:
        sure["detector"] = wishes.detector_found
    if wishes.resample is not None:
        sure["fit"] = f"{sure['fit']}; given by --resample" if "fit" in sure else "given by --resample"
    elif wishes.fit is not None and "resample" in sure:
        sure["fit"] = f"{sure['fit']}; interpolation {sure['resample']}"
    if (described.kind or wishes.kind) != "detector":
        sure.setdefault("orientation", STORED)
    return {key: sure[key] for key in KEYS if key in sure}


def _refuse_other_labels(described: ModelDescription, wishes: Wishes) -> None:
    """Refuse another variant, another number of labels, or the file's own in another order."""
    if described.variant is not None and wishes.variant not in {None, described.variant}:
        why = described.sure["variant"]
        raise ConfigError(f"{described.file} is {described.variant} by {why}: leave out --variant {wishes.variant}")
    given, names, count = wishes.labels, described.labels, described.label_count
    if given is not None and count is not None and len(given) != count:
        if count == 1:
            raise ConfigError(
                f"{described.file} has one output, and --labels names {len(given)}: give --labels LABEL for a high "
                "value, and --otherwise OTHER for a low one"
            )
        raise ConfigError(f"{described.file} has {count} labels, and --labels names {len(given)}: name each label")
    if given is None or names is None:
        return
    if wrong := moved(given, names):
        raise ConfigError(
            f"{described.file} has {_shown(list(names))} in this order, and --labels has {wrong[0]} in another place: "
            "leave out --labels, or give each output a new name"
        )
    if wishes.names is None and len(others := renamed(given, names)) > 1:
        example = ",".join(f"{name}=..." for name, _ in others[:LABELS_SHOWN])
        raise ConfigError(
            f"{described.file} has {_shown(list(names))}, and --labels has other words: say which is which, --labels "
            f"{example}"
        )


def _with_names(described: ModelDescription, wishes: Wishes) -> Wishes:
    """Wishes with ``labels`` in the order of the file, and with ``names`` wherever a word differs from the file's."""
    names, given = described.labels, wishes.labels
    if wishes.names is None or given is None:
        is_one_renamed = names and given and len(names) == len(given) and len(renamed(given, names)) == 1
        return replace(wishes, names=names) if is_one_renamed else wishes
    if names is None:
        raise ConfigError(
            f"{described.file} names no labels: give --labels first,second,... in the order of its outputs"
        )
    words = dict(zip(wishes.names, given, strict=True))
    if unknown := [name for name in words if name not in names]:
        raise ConfigError(f"{described.file} has {_shown(list(names))}, no {unknown[0]}: correct --labels")
    return replace(wishes, names=names, labels=tuple(words.get(name, name) for name in names))


def _renamed(described: ModelDescription, wishes: Wishes) -> tuple[str, ...]:
    if wishes.labels is None or described.labels in {None, wishes.labels}:
        return ()
    shown = [f"{name} is {given}" for name, given in renamed(wishes.labels, described.labels or ())]
    cut = [*shown[:LABELS_SHOWN], "..."] if len(shown) > LABELS_SHOWN else shown
    return (f"labels are renamed by --labels: {', '.join(cut)}",) if cut else ()


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
def _put_in_place(weights: Path, settled: _Settled) -> Iterator[None]:
    """Weights at the path for the line file; removed after an error. Raises ConfigError for other weights there."""
    if settled.is_in_place or settled.weights.exists():
        if not settled.is_in_place and file_sha256(settled.weights) != file_sha256(weights):
            there = f"{settled.weights} exists already, and is another file"
            raise ConfigError(f"{there}: choose another --id, or remove that file")
        yield
        return
    settled.weights.parent.mkdir(parents=True, exist_ok=True)
    with weights.open("rb") as file, whole_file(settled.weights, has_rivals=True) as final:
        shutil.copyfileobj(file, final)
    try:
        yield
    except BaseException:
        settled.weights.unlink(missing_ok=True)
        raise


def _compared(
    settled: _Settled, weights: Path, check: GivenAnswers, anyway: str | None, progress: Report
) -> ComparedEntry:
    found = checked(settled.expert, {**settled.entry, "weights": str(weights)}, settled.sure, check, progress)
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
    lines += [f"  {key:<13}{_shown(values[key]):<24} {why}" for key, why in added.sure.items() if key in values]
    lines += [f"  {each}" for each in added.said]
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


def _shown(value: object, maximum: int = LABELS_SHOWN) -> str:
    if isinstance(value, dict):
        return rendered(value)
    if not isinstance(value, list):
        return str(value)
    if all(isinstance(each, int) for each in value):
        return "x".join(map(str, value))
    names = [str(each) for each in value]
    return ", ".join(names if len(names) <= maximum else [*names[:maximum], "..."])
