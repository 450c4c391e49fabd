"""Labelled crops: rendered, or read from ``DATA/<component>/<label>/*.png``; and divided into training and held-out.

Crops of one image are never divided, for they may show the same spot twice. A file's name up to its first dash is the
image that it was cut from: ``00041006-7.png`` comes from image 00041006, in the folder of any label or component.
Other names count up to their date and time, else their first number (``IMG_0001_3``, ``0001_120_80``), without words of
their folders and whatever calls itself a place (``_x120_y80``, ``_crop3``). That rather keeps too many crops together.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from PIL import Image

from agent.demo.rendering.components import OK, ComponentType
from agent.demo.rendering.render import crop, render_panels
from experts.errors import ConfigError, ImageError
from experts.images import read_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from agent.demo.rendering.render import Fractions

MEASURED_GOOD = 41.0  # of good measured parts: half are trained on, and 100 others warrant 1 % of false alarms
DETECTED = 3.0  # of both states of a detector's parts: its head, which is not stored, learns from these
HARD = {OK: 2.0, "bridge": 2.0, "bent-pin": 2.0}
MIN_CROPS_PER_LABEL = 5  # fewer cannot be divided into training and held-out
DATE = re.compile(r"(19|20)\d\d[-_.]?[01]\d[-_.]?[0-3]\d([-_ T.]?[0-2]\d[-_.:h]?[0-5]\d[-_.:m]?[0-5]\d)?")
SPOT = re.compile(r"(?i)[-_ .@(]+(x|y|r|c|w|h|row|col|column|crop|tile|patch|part|roi|box|det|obj)[-_=]?\d.*")
NUMBER = re.compile(r"\D*\d+")
PLACE = attrgetter("component", "label", "file")


@dataclass(frozen=True, slots=True, eq=False)
class LabelledCrop:
    """One crop and the truth about it. ``pixels``: uint8 RGB (height, width, 3).

    ``body``: place of the part in a rendered crop; None where it is missing.
    """

    component: str
    label: str
    file: str
    pixels: NDArray[np.uint8]
    body: Fractions | None = None

    @property
    def source(self) -> str:
        """Name of the image that the crop was cut from; rendered crops are each from a place of their own."""
        stem = self.file.rsplit(".", 1)[0].casefold()
        if self.body is not None:
            return f"{self.component}/{self.label}/{stem}"
        folders = "|".join(re.escape(name.casefold()) for name in (self.component, self.label))
        name = re.sub(rf"(^|[-_ ])({folders})(?=[-_ ]|$)", "", stem).strip("-_ ") or stem
        if date := DATE.search(name):
            return name[: date.end()]
        image, dash, _ = (SPOT.sub("", name) or name).partition("-")
        number = None if dash else NUMBER.match(image)
        return image if number is None else number[0]


def render_crops(
    components: Sequence[ComponentType],
    crops_per_label: int,
    seed: int,
    threads: int,
    progress: Callable[[str, int, int], None],
) -> tuple[LabelledCrop, ...]:
    """Crops of each component in each state, ordered by component, label and file."""
    parts = [
        (component, label)
        for component in components
        for label in component.labels
        for _ in range(crop_count(component, label, crops_per_label))
    ]
    counts: Counter[tuple[str, str]] = Counter()
    crops = []
    for board in render_panels(parts, seed, threads):
        for place in board.placements:
            kind = (place.component, place.label)
            crops.append(LabelledCrop(*kind, f"{counts[kind]:04d}.png", crop(board, place), place.body))
            counts[kind] += 1
        progress("render", len(crops), len(parts))
    return tuple(sorted(crops, key=PLACE))


def crop_count(component: ComponentType, label: str, crops_per_label: int) -> int:
    if component.measured and label == OK:
        relative = MEASURED_GOOD
    elif component.detector and label in {OK, component.detector.defect}:
        relative = DETECTED
    else:
        relative = HARD.get(label, 1.0)
    return max(round(crops_per_label * relative), MIN_CROPS_PER_LABEL)


def save_crops(directory: Path, crops: Iterable[LabelledCrop]) -> None:
    """Write the crops in the layout that ``load_crops`` reads."""
    for each in crops:
        folder = directory / each.component / each.label
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each.pixels).save(folder / each.file, compress_level=1)


def load_crops(directory: Path) -> tuple[LabelledCrop, ...]:
    """All crops below DATA, ordered by component, label and file.

    Raises ConfigError when there is no component, a component without ``ok`` or without a defect, too few crops of a
    label, or a crop that is no image.
    """
    folders = [folder for folder in subfolders(directory) if not folder.name.startswith(".")]
    if not folders:
        raise ConfigError(f"{directory} holds no component folder: expected {directory}/<component>/<label>/*.png")
    return tuple(crop for folder in folders for crop in load_component(folder))


def subfolders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder: expected {directory}/<component>/<label>/*.png")
    return sorted(entry for entry in directory.iterdir() if entry.is_dir())


def load_component(folder: Path) -> list[LabelledCrop]:
    if "_" in folder.name or "." in folder.name or " " in folder.name:  # see the line file's pattern, and expert ids
        raise ConfigError(
            f"{folder}: a component's name must not hold an underscore, a dot or a space; rename the folder"
        )
    crops = []
    for label in subfolders(folder):
        files = sorted(label.glob("*.png"))
        if len(files) < MIN_CROPS_PER_LABEL:
            raise ConfigError(f"{label} holds {len(files)} crops (*.png): at least {MIN_CROPS_PER_LABEL} are needed")
        crops += [LabelledCrop(folder.name, label.name, file.name, read_pixels(file)) for file in files]
    names = {each.label for each in crops}
    if OK not in names or len(names) < 2:
        raise ConfigError(f"{folder} has the labels {sorted(names)}: {OK!r} and at least one defect are needed")
    if len(sources := {each.source for each in crops}) < 2:
        raise ConfigError(
            f"{folder}: by their names, all crops are from one image, {sources.pop()}, and none can be held out: name "
            "them IMAGE-NUMBER.png, the image before the first dash"
        )
    return crops


def read_pixels(file: Path) -> NDArray[np.uint8]:
    try:
        return read_image(file, str(file))
    except ImageError as error:
        raise ConfigError(f"{file} cannot be read as an image: {error.message}") from error


def divide(
    crops: Iterable[LabelledCrop], held_out_fraction: float, seed: int = 0
) -> tuple[tuple[LabelledCrop, ...], tuple[LabelledCrop, ...]]:
    """Training and held-out: about this fraction of each component's each label, whole source images at a time.

    Sources come in an order drawn from the seed; one is held out if that brings the labels nearer to the fraction and
    leaves something of each of its labels to train on. Depends on names only, not on the order of the crops.
    """
    ordered = sorted(crops, key=PLACE)
    kinds: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for each in ordered:
        kinds[each.source][each.component, each.label] += 1
    totals = sum(kinds.values(), Counter())
    held: Counter[tuple[str, str]] = Counter()
    chosen = set()
    for source in sorted(kinds, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest()):
        kind = kinds[source]
        lacking = {key: held_out_fraction * totals[key] - held[key] for key in kind}
        gain = sum(abs(lacking[key]) - abs(lacking[key] - count) for key, count in kind.items())
        if gain > 0 and all(held[key] + count < totals[key] for key, count in kind.items()):
            chosen.add(source)
            held += kind
    training = tuple(each for each in ordered if each.source not in chosen)
    return training, tuple(each for each in ordered if each.source in chosen)
