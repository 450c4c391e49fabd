"""Facts of a model that is added: from its file, from the user's options, or asked for.

Guarantees: each fact has evidence in words. An option that contradicts the file is refused, or named beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.line_file.editing import rendered
from experts.architectures import PLAIN
from experts.errors import ConfigError
from experts.expert import NOTHING_FOUND
from experts.images import is_turned
from experts.labels import moved, renamed
from experts.model_files.description import FIT_OPTIONS, NO_RESAMPLER, in_grey

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from experts.model_files.description import Kind, ModelDescription

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


def known_facts(described: ModelDescription, wishes: Wishes) -> ModelDescription:
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


def asked_for_turned(described: ModelDescription, images: Iterable[Path]) -> ModelDescription:
    """Ask for the orientation where it shows: nothing states it, and an image has one."""
    turned = next((each for each in images if is_turned(each)), None)
    if turned is None or described.orientation is not None or described.kind == "detector":
        return described
    return replace(described, missing={**described.missing, "orientation": TURNED.format(turned)})


def asked_for_function(described: ModelDescription, wishes: Wishes) -> ModelDescription:
    """Ask for the function that scales alone, where the fit is known but for it."""
    if "fit" not in described.missing or (wishes.fit is None and described.fit is None):
        return described
    missing = {key: why for key, why in described.missing.items() if key != "fit"}
    return replace(described, missing=missing if _fit(described, wishes) else {**missing, "resample": NO_RESAMPLER})


def _is_cut(fit: str | dict[str, Any] | None) -> bool:
    return isinstance(fit, dict) and "resize" in fit


def missing_facts(described: ModelDescription, known: ModelDescription, wishes: Wishes) -> dict[str, str]:
    missing = {key: why for key, why in described.missing.items() if getattr(known, key) is None}
    if wishes.fit is None and _is_cut(known.fit) and described.size not in {None, known.size}:
        found = f"{rendered(known.fit)} ({described.evidence['fit']})"
        missing["fit"] = f"the file has {found}, for another size: {FIT_OPTIONS}"
    if known.task == "multilabel" and known.label_count == 1 and wishes.otherwise is None:
        missing["otherwise"] = ONE_LABEL_OF_TWO
    return missing


def entry_of(known: ModelDescription, wishes: Wishes, weights: Path) -> dict[str, Any]:
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


def evidence_of(described: ModelDescription, wishes: Wishes) -> dict[str, str]:
    """Evidence by key: the file, or an option, with the file's different value."""
    evidence = dict(described.evidence)
    for key in (
        *("task", "labels", "otherwise", "size", "normalize", "fit", "orientation"),
        *("bits", "window", "variant", "suppression"),
    ):
        given, found = getattr(wishes, key), getattr(described, key, None)
        if given is not None and found is not None and found != given:
            shown = in_words(list(found) if isinstance(found, tuple) else found, maximum=LABELS_OF_FILE)
            evidence[key] = f"given by --{key}; the file has {shown} ({described.evidence[key]})"
        elif given is not None:
            evidence[key] = f"given by --{key}"
    if wishes.detector_found is not None:
        evidence["detector"] = wishes.detector_found
    if wishes.resample is not None:
        evidence["fit"] = f"{evidence['fit']}; given by --resample" if "fit" in evidence else "given by --resample"
    elif wishes.fit is not None and "resample" in evidence:
        evidence["fit"] = f"{evidence['fit']}; interpolation {evidence['resample']}"
    if (described.kind or wishes.kind) != "detector":
        evidence.setdefault("orientation", STORED)
    return {key: evidence[key] for key in KEYS if key in evidence}


def refuse_other_labels(described: ModelDescription, wishes: Wishes) -> None:
    """Refuse another variant, another number of labels, or the file's own in another order."""
    if described.variant is not None and wishes.variant not in {None, described.variant}:
        why = described.evidence["variant"]
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
            f"{described.file} has {in_words(list(names))} in this order, and --labels has {wrong[0]} in another "
            "place: leave out --labels, or give each output a new name"
        )
    if wishes.names is None and len(others := renamed(given, names)) > 1:
        example = ",".join(f"{name}=..." for name, _ in others[:LABELS_SHOWN])
        raise ConfigError(
            f"{described.file} has {in_words(list(names))}, and --labels has other words: say which is which, --labels "
            f"{example}"
        )


def with_names(described: ModelDescription, wishes: Wishes) -> Wishes:
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
        raise ConfigError(f"{described.file} has {in_words(list(names))}, no {unknown[0]}: correct --labels")
    return replace(wishes, names=names, labels=tuple(words.get(name, name) for name in names))


def renamed_labels(described: ModelDescription, wishes: Wishes) -> tuple[str, ...]:
    if wishes.labels is None or described.labels in {None, wishes.labels}:
        return ()
    shown = [f"{name} is {given}" for name, given in renamed(wishes.labels, described.labels or ())]
    cut = [*shown[:LABELS_SHOWN], "..."] if len(shown) > LABELS_SHOWN else shown
    return (f"labels are renamed by --labels: {', '.join(cut)}",) if cut else ()


def in_words(value: object, maximum: int = LABELS_SHOWN) -> str:
    if isinstance(value, dict):
        return rendered(value)
    if not isinstance(value, list):
        return str(value)
    if all(isinstance(each, int) for each in value):
        return "x".join(map(str, value))
    names = [str(each) for each in value]
    return ", ".join(names if len(names) <= maximum else [*names[:maximum], "..."])
