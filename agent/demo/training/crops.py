"""Labelled crops on disk: ``DATA/<component>/<label>/*.png``, and how they are divided into training and held-out.

A file's name up to its first dash is the image that it was cut from: ``00041006-7.png`` comes from image 00041006.
Crops of one image are never divided, for they may show the same spot twice. A folder ``DATA/<component>`` may hold a
``bodies.json`` with the part's extent in each crop, as fractions of its sides; detectors are trained from that.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError

from agent.demo.rendering.components import OK, ComponentType
from agent.demo.rendering.render import crop, render_panels
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from agent.demo.rendering.render import Fractions

BODIES_FILE = "bodies.json"
CROPS_PER_LABEL = 16  # the stored network has seen others of each component
RELATIVE_COUNTS = {OK: 2.0, "missing": 0.6, "bent-pin": 2.0, "bridge": 2.5, "shifted": 2.0}
MEASURED_GOOD = 12.8  # of good parts that are measured: half of them teach, and 100 vouch for 1 % of false alarms
CHIP_FRACTION = 0.6  # chips look so much alike that they learn from one another
MIN_CROPS_PER_LABEL = 5  # fewer cannot be divided into training, validation and held-out


@dataclass(frozen=True, slots=True, eq=False)
class LabelledCrop:
    """One crop and the truth about it. ``pixels``: uint8 RGB (height, width, 3)."""

    component: str
    label: str
    file: str
    pixels: NDArray[np.uint8]
    body: Fractions | None = None

    @property
    def source(self) -> str:
        stem = self.file.rsplit(".", 1)[0]
        return stem.partition("-")[0] if "-" in stem else f"{self.component}/{self.label}/{stem}"


def write_crops(
    directory: Path,
    components: Sequence[ComponentType],
    crops_per_label: int,
    seed: int,
    threads: int,
    progress: Callable[[str, int, int], None],
) -> int:
    """Render crops of each component in each state into the labelled-crops layout. Returns how many were written.

    Parts without traces are rendered apart, so that the crops of the others do not depend on them.
    """
    parts = [
        (component, label)
        for component in components
        for label in component.labels
        for _ in range(crop_count(component, label, crops_per_label))
    ]
    bodies: dict[str, dict[str, Fractions]] = {component.name: {} for component in components}
    counts: Counter[tuple[str, str]] = Counter()
    groups = [[part for part in parts if part[0].is_wired is wired] for wired in (True, False)]
    for board in chain.from_iterable(render_panels(group, seed, threads) for group in groups if group):
        for placement in board.placements:
            kind = (placement.component, placement.label)
            name = f"{counts[kind]:04d}.png"
            counts[kind] += 1
            folder = directory / placement.component / placement.label
            folder.mkdir(parents=True, exist_ok=True)
            crop(board, placement).save(folder / name, compress_level=1)
            if placement.body is not None:
                bodies[placement.component][f"{placement.label}/{name}"] = placement.body
        progress("render", counts.total(), len(parts))
    for component, boxes in bodies.items():
        (directory / component / BODIES_FILE).write_text(json.dumps(boxes, indent=0))
    return counts.total()


def crop_count(component: ComponentType, label: str, crops_per_label: int) -> int:
    fraction = CHIP_FRACTION if component.package == "chip" else 1.0
    relative = MEASURED_GOOD if component.measured and label == OK else RELATIVE_COUNTS.get(label, 1.0)
    return max(round(crops_per_label * fraction * relative), MIN_CROPS_PER_LABEL)


def load_crops(directory: Path) -> tuple[LabelledCrop, ...]:
    """All crops below DATA, ordered by component, label and file.

    Raises ConfigError when there is no component, a component without ``ok`` or without a defect, too few crops of a
    label, or a crop that is no image.
    """
    folders = sorted(folder for folder in subfolders(directory) if not folder.name.startswith("."))
    if not folders:
        raise ConfigError(f"{directory} holds no component folder: expected {directory}/<component>/<label>/*.png")
    return tuple(crop for folder in folders for crop in load_component(folder))


def subfolders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder: expected {directory}/<component>/<label>/*.png")
    return [entry for entry in directory.iterdir() if entry.is_dir()]


def load_component(folder: Path) -> list[LabelledCrop]:
    check_name(folder)
    bodies = load_bodies(folder / BODIES_FILE)
    crops = []
    labels = sorted(subfolders(folder))
    for label in labels:
        files = sorted(label.glob("*.png"))
        if len(files) < MIN_CROPS_PER_LABEL:
            raise ConfigError(f"{label} holds {len(files)} crops (*.png): at least {MIN_CROPS_PER_LABEL} are needed")
        crops += [
            LabelledCrop(folder.name, label.name, file.name, read_pixels(file), bodies.get(f"{label.name}/{file.name}"))
            for file in files
        ]
    names = {label.name for label in labels}
    if OK not in names or len(names) < 2:
        raise ConfigError(f"{folder} has the labels {sorted(names)}: {OK!r} and at least one defect are needed")
    return crops


def check_name(folder: Path) -> None:
    """A component's name goes into file names such as board_component_ref.png and into expert ids."""
    if "_" in folder.name or "." in folder.name or " " in folder.name:
        raise ConfigError(
            f"{folder}: a component's name must not hold an underscore, a dot or a space; rename the folder"
        )


def load_bodies(file: Path) -> dict[str, Fractions]:
    if not file.exists():
        return {}
    try:
        return {
            name: (float(a), float(b), float(c), float(d))
            for name, (a, b, c, d) in json.loads(file.read_text()).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is not a JSON object of name: [left, top, right, bottom]: {error}") from error


def read_pixels(file: Path) -> NDArray[np.uint8]:
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(f"{file} cannot be read as an image: {error}") from error


@dataclass(frozen=True, slots=True)
class Division:
    """Crops in two parts that share no source image."""

    training: tuple[LabelledCrop, ...]
    held_out: tuple[LabelledCrop, ...]


def divide(crops: Iterable[LabelledCrop], held_out_fraction: float, seed: int = 0) -> Division:
    """Hold out about this fraction of each component's each label, whole source images at a time.

    Sources come in an order drawn from the seed; one is held out if that brings the labels nearer to the fraction and
    leaves something of each of its labels to train on. Depends on names only, not on the order of the crops.
    """
    by_source: dict[str, list[LabelledCrop]] = {}
    for crop_ in crops:
        by_source.setdefault(crop_.source, []).append(crop_)
    kinds = {
        source: Counter((crop_.component, crop_.label) for crop_ in members) for source, members in by_source.items()
    }
    totals: Counter[tuple[str, str]] = Counter()
    for kind in kinds.values():
        totals += kind
    held: Counter[tuple[str, str]] = Counter()
    chosen = set()
    for source in sorted(by_source, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest()):
        kind = kinds[source]
        gain = sum(
            abs(held_out_fraction * totals[key] - held[key]) - abs(held_out_fraction * totals[key] - held[key] - count)
            for key, count in kind.items()
        )
        if gain > 0 and all(held[key] + count < totals[key] for key, count in kind.items()):
            chosen.add(source)
            held += kind
    ordered = sorted(
        (crop_ for members in by_source.values() for crop_ in members), key=lambda c: (c.component, c.label, c.file)
    )
    return Division(
        tuple(crop_ for crop_ in ordered if crop_.source not in chosen),
        tuple(crop_ for crop_ in ordered if crop_.source in chosen),
    )
