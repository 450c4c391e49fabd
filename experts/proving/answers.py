"""Labelled images: what a trainer's own pipeline, or a person, answered on each.

All of these are read, wherever the product takes samples:

    LABEL/*.png, COMPONENT/LABEL/*.png     folders of labels, as torchvision's ImageFolder reads them (good/, bad/ too)
    data.yaml, or images/ and labels/      YOLO data: its `val` images with their boxes; a sixth column is a score
    FILE.csv, FILE.json                    rows of file, label, score, and also scores, boxes, anomaly, component
    a folder with answers.json             as `coserve experts add --check` keeps them

Guarantees: every image is there, and named once; nothing is guessed. Errors name the file and the line.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from experts.document import read_document
from experts.errors import ConfigError, FilePlace
from experts.expert import NOTHING_FOUND
from experts.filesystem import whole_folder
from experts.images import ENDINGS, upright_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

ANSWERS = "answers.json"
TABLES = (ANSWERS, "answers.csv")  # in a folder
KINDS = (
    "give LABEL/*.png, YOLO data (data.yaml, or images/ and labels/), or a .csv or .json of file, label, score, as "
    "docs/models.md shows"
)
NESTED = ("scores", "boxes")  # JSON in a cell of a table
MOST_BYTES = 256 * 2**20
YOLO_NAMES_ABOVE = 3  # folders above YOLO images in which their data.yaml may be

Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class KnownBox:
    """A box of an answer; corners in pixels of the image as viewers show it. ``score``: None for a person's."""

    label: str
    left: float
    top: float
    right: float
    bottom: float
    score: float | None = None


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Known facts of one image; None: not stated. ``scores``: by label. ``boxes``: empty where nothing was found.

    ``label``: a detector's is its best box's. ``anomaly``: the score of an anomaly model, on its own scale.
    """

    image: Path
    label: str | None = None
    score: float | None = None
    scores: tuple[tuple[str, float], ...] = ()
    boxes: tuple[KnownBox, ...] | None = None
    anomaly: float | None = None
    component: str | None = None

    @property
    def finds_something(self) -> bool:
        return bool(self.boxes) or (self.boxes is None and self.label != NOTHING_FOUND)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _BoxRow(_Strict):
    label: str
    left: Number
    top: Number
    right: Number
    bottom: Number
    score: Share | None = None


class _Row(_Strict):
    file: Annotated[str, Field(min_length=1)]
    label: str | None = None
    score: Share | None = None
    scores: dict[str, Share] = {}
    boxes: tuple[_BoxRow, ...] | None = None
    anomaly: Number | None = None
    component: str | None = None


def read_answers(source: Path, components: Collection[str] = (), labels: Sequence[str] = ()) -> tuple[KnownAnswer, ...]:
    """All answers of a file or folder. ``components``: the line's, which distinguish components from labels.
    ``labels``: of the expert, for YOLO data without names. Raises ConfigError; also for none."""
    if (table := _table_of(source)) is not None:
        answers = _of_table(table)
    elif (data := _yolo_of(source)) is not None:
        answers = tuple(_of_yolo(data, labels))
    elif source.is_dir():
        found = (known_by_folder(source, image, components) for image in images_below(source))
        answers = tuple(each for each in found if each is not None)
    else:
        raise ConfigError(f"{source}: holds no labelled images - {KINDS}")
    if not answers:
        raise ConfigError(f"{source}: no image with a label was found - {KINDS}")
    return answers


def is_stated(source: Path) -> bool:
    """True if a table or YOLO data state the answers, not only folders."""
    return _table_of(source) is not None or _yolo_of(source) is not None


def keep_answers(answers: Sequence[KnownAnswer], folder: Path) -> tuple[KnownAnswer, ...]:
    """Copy images and answers into a new folder, which appears whole. Raises OSError, ConfigError."""
    names = [f"{number:04}-{answer.image.name}" for number, answer in enumerate(answers, start=1)]
    with whole_folder(folder) as made:
        for answer, name in zip(answers, names, strict=True):
            shutil.copyfile(answer.image, made / name)
        rows = [_as_row(answer, name) for answer, name in zip(answers, names, strict=True)]
        text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (made / ANSWERS).write_text(f"[\n{text}\n]\n", "utf-8")
    return tuple(replace(answer, image=folder / name) for answer, name in zip(answers, names, strict=True))


def _as_row(answer: KnownAnswer, name: str) -> dict[str, Any]:
    row = {**asdict(answer), "image": None, "scores": dict(answer.scores) or None}
    return {"file": name} | {key: value for key, value in row.items() if value is not None}


def _table_of(source: Path) -> Path | None:
    if source.is_dir():
        return next((source / name for name in TABLES if (source / name).is_file()), None)
    return source if source.is_file() and source.suffix.lower() in {".csv", ".json"} else None


def _of_table(file: Path) -> tuple[KnownAnswer, ...]:
    text = _text(file)
    rows = _json_rows(file, text) if file.suffix.lower() == ".json" else _csv_rows(file, text)
    answers: dict[Path, KnownAnswer] = {}
    for line, values in rows:
        answer = _answer(file, line, values)
        if answer.image in answers:
            raise _error(file, line, "file", f"{answer.image.name} is there twice - keep one row of it")
        answers[answer.image] = answer
    return tuple(answers.values())


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{file}: has more than {MOST_BYTES} bytes - is it the right file?")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}) - check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: byte {error.start} is not UTF-8 - save the file as UTF-8") from error


def _csv_rows(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    heading = text.partition("\n")[0]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=";" if ";" in heading else ",", strict=True)
    if "file" not in (rows.fieldnames or ()):
        raise _error(file, 1, "file", "the first line names no column `file` - write `file,label,score` above the rows")
    try:
        for row in rows:
            if None in row or None in row.values():
                raise _error(file, rows.line_num, "row", "has not as many cells as the first line - correct it")
            cells = {key.strip(): cell.strip() for key, cell in row.items() if cell.strip()}
            for key in cells.keys() & {*NESTED}:
                cells[key] = json.loads(cells[key])
            yield rows.line_num, cells
    except (csv.Error, ValueError) as error:
        raise _error(file, rows.line_num, "row", f"{error} - correct it") from error


def _json_rows(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a list one by one, each with its line; also one object a line."""
    decoder, place, line, counted = json.JSONDecoder(), 0, 1, 0
    separators = " \t\r\n,[]"
    if text.lstrip().startswith("[") and not text.rstrip().endswith("]"):
        raise _error(file, text.count("\n") + 1, "syntax", "the list has no end - was the file written completely?")
    while True:
        while place < len(text) and text[place] in separators:
            place += 1
        line, counted = line + text.count("\n", counted, place), place
        if place == len(text):
            return
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            at = line + text.count("\n", counted, getattr(error, "pos", counted))
            raise _error(file, at, "syntax", f"{getattr(error, 'msg', error)} - correct the JSON") from error
        if not isinstance(found, dict):
            raise _error(file, line, "row", 'is no object - write {"file": "1.png", "label": "ok", "score": 0.98}')
        yield line, found


def _answer(file: Path, line: int, values: dict[str, Any]) -> KnownAnswer:
    try:
        row = _Row.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "row"
        known = f" - known: {', '.join(_Row.model_fields)}" if first["type"] == "extra_forbidden" else " - correct it"
        raise _error(file, line, key, f"{first['msg']}{known}") from error
    image = file.parent / row.file
    if not image.is_file():
        raise _error(file, line, "file", f"{image} is not there - paths are relative to this file")
    boxes = None if row.boxes is None else tuple(KnownBox(**dict(box)) for box in row.boxes)
    label = row.label or (None if boxes is None else best_label(boxes))
    if label is None and not row.scores and row.anomaly is None:
        raise _error(file, line, "label", "says nothing of the image - give label, scores, boxes or anomaly")
    label = label or max(row.scores, key=lambda name: row.scores[name], default=None)
    return KnownAnswer(image, label, row.score, tuple(row.scores.items()), boxes, row.anomaly, row.component)


def best_label(boxes: Sequence[KnownBox]) -> str:
    """Label of the best box. Boxes of a person have no best one: the first counts."""
    return max(boxes, key=lambda box: box.score or 0.0).label if boxes else NOTHING_FOUND


def known_by_folder(root: Path, image: Path, components: Collection[str]) -> KnownAnswer | None:
    """Answer by the folders of an image below ``root``; None: it lies in none."""
    parts = image.relative_to(root).parts[:-1]
    has_component = bool(parts) and parts[0] in components
    labels = parts[1:] if has_component else parts
    return KnownAnswer(image, labels[0], component=parts[0] if has_component else None) if labels else None


def images_below(folder: Path) -> Iterator[Path]:
    """Images below a folder, by their endings, in the order of their paths."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in ENDINGS and not is_hidden and path.is_file():
            yield path


@dataclass(frozen=True, slots=True)
class _Yolo:
    images: tuple[Path, ...]
    names: dict[int, str] | None


def _yolo_of(source: Path) -> _Yolo | None:
    file = source / "data.yaml" if source.is_dir() else source
    if file.is_file() and file.suffix.lower() in {".yaml", ".yml"}:
        values = read_document(file).values
        if "names" not in values or not isinstance(values.get("val"), str):
            raise ConfigError(f"{file}: needs `names:` and `val:`, as YOLO data have them")
        base = file.parent / str(values.get("path") or "")
        roots = [base / values["val"], file.parent / values["val"]]  # ultralytics writes absolute paths of its machine
        root = next((each for each in roots if each.is_dir()), None)
        if root is None:
            raise ConfigError(f"{file}: val: {roots[-1]} is no folder - correct it")
        return _Yolo(tuple(images_below(root)), _names(file, values["names"]))
    folder = source / "images" if (source / "labels").is_dir() else source
    if not (folder.is_dir() and "images" in folder.parts and _labels_beside(folder).is_dir()):
        return None
    above = (each / "data.yaml" for each in (source, *source.absolute().parents[:YOLO_NAMES_ABOVE]))
    described = next((each for each in above if each.is_file()), None)
    names = None if described is None else _names(described, read_document(described).values.get("names"))
    return _Yolo(tuple(images_below(folder)), names)


def _names(file: Path, found: object) -> dict[int, str]:
    try:
        listed = enumerate(found) if isinstance(found, list) else found.items()  # type: ignore[attr-defined]
        return {int(key): str(name) for key, name in listed}
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"{file}: names: is neither a list nor numbers with names - correct it") from error


def _labels_beside(path: Path) -> Path:
    """The path with its last `images` as `labels`, as in ultralytics' img2label_paths (8.4, data/utils.py)."""
    parts = list(path.parts)
    last = len(parts) - 1 - parts[::-1].index("images")
    return Path(*parts[:last], "labels", *parts[last + 1 :])


def _of_yolo(data: _Yolo, labels: Sequence[str]) -> Iterator[KnownAnswer]:
    names = data.names or dict(enumerate(labels))
    if data.images and "images" not in data.images[0].parts:
        raise ConfigError(f"{data.images[0].parent}: is not below a folder `images`, beside which `labels` lies")
    for image in data.images:
        file = _labels_beside(image).with_suffix(".txt")
        lines = _text(file).splitlines() if file.is_file() else []
        size = upright_size(image) if lines else (0, 0)
        boxes = tuple(
            _yolo_box(file, number, line.split(), names, size)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        )
        yield KnownAnswer(image, best_label(boxes), boxes=boxes)


def _yolo_box(file: Path, line: int, words: Sequence[str], names: dict[int, str], size: tuple[int, int]) -> KnownBox:
    try:
        number, (x, y, width, height, *score) = int(words[0]), map(float, words[1:])
        if len(score) > 1:
            raise ValueError("more than six numbers")
    except ValueError as error:
        advice = "write class, x, y, width, height in shares of the image, and perhaps a score"
        raise _error(file, line, "box", f"is not a box ({error}) - {advice}") from error
    if number not in names:
        raise _error(file, line, "box", f"class {number} has no name - give data.yaml with `names:`")
    rows, columns = size
    corners = (x - width / 2) * columns, (y - height / 2) * rows, (x + width / 2) * columns, (y + height / 2) * rows
    return KnownBox(names[number], *corners, score=score[0] if score else None)


def _error(file: Path, line: int, key: str, message: str) -> ConfigError:
    return ConfigError(message, FilePlace(file, line, 1, key))
