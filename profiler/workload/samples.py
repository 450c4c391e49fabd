"""Real images of a line on which its experts are measured: labelled crops, or images of its intake folders.

Guarantees: equal files give equal samples; every sample was decoded once; no file is moved or written. An expert has
images of the components whose routes contain it, spread evenly over their names: in turn of each label or shelf
(``done/``, ``ng/``), and of each component on it, which has one at least; or of each component alone, if defects must
be as rare as on the line. Samples are labelled crops (``FOLDER/<component>/<label>/...``) and images whose names or
sidecars the line's intake can read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.sources.folder.files.inbox import DONE, NG
from agent.sources.folder.files.naming import naming_of
from agent.sources.folder.files.shelves import as_it_came, files_below, name_of
from agent.sources.folder.files.sidecar import SUFFIX
from experts.calibrations import FORMAT
from experts.errors import ConfigError, ImageError
from experts.images import DEFAULT_MAX_PIXELS, read_image
from experts.proving.answers import is_stated, known_by_folder, read_answers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.sources.folder.files.naming import Naming
    from experts.proving.answers import KnownAnswer

MOST_PER_EXPERT = 40  # or EACH_COMPONENT of each component, of an expert that many components share
EACH_COMPONENT = 2
MOST_CALIBRATING = 16  # further images of an expert, half of all that it has at most
MOST_IN_MIX = 200  # of each component: as many requests as the engine plays in a search
SYNTHETIC = "synthetic"
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are evenly spread for any count
NAMED_PROBLEMS = 3  # of files that cannot be used, in a message


@dataclass(frozen=True, slots=True)
class Sample:
    """Sound image. ``folder``: name in messages; ``max_pixels``: its intake's limit."""

    path: Path
    component: str
    label: str | None
    folder: str
    max_pixels: int = DEFAULT_MAX_PIXELS


@dataclass(frozen=True, slots=True)
class LineSamples:
    """Samples by expert, without experts that have none. ``broken``: undecodable files, with reasons.

    ``calibrating``: by expert, images to calibrate forms of eight bits, an equal share of each label and at most half
    of an expert's; where images are few, some are samples as well, but not held out. ``are_held_out``: of
    ``held_out()``. ``mix``: by component at most MOST_IN_MIX, with labels as rare as among its files in every prefix;
    images without an expert are not decoded yet (``Checked``).
    """

    by_expert: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    mix: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    calibrating: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    are_held_out: bool = False

    @classmethod
    def find(
        cls, config: LineConfig, folder: Path | None = None, most: int = MOST_PER_EXPERT, *, is_label_even: bool = True
    ) -> LineSamples:
        """About ``most`` samples of each expert, from ``folder`` or else from the line's own intake folders.

        ``is_label_even``: an equal share of each label or shelf, so that rare defects are seen, and EACH_COMPONENT of
        each component; else of each component alone, with labels as rare as among its files. Raises ConfigError for a
        given folder without a usable image, with the number of files and the reasons.
        """
        search = _Search(config)
        if folder is not None:
            search.look_into(folder)
        else:
            for section in config.intake.folders:
                search.look_into_intake(section.path, naming_of(section, config), section.max_pixels)
        samples = search.choose(most, is_label_even=is_label_even)
        if folder is not None and not samples.by_expert:
            raise ConfigError(search.complaint(folder, samples.broken))
        return samples

    def of(self, expert: str) -> tuple[Sample, ...]:
        return self.by_expert.get(expert, ())

    def held_out(self) -> LineSamples:
        """Samples without images of the calibration, which must not judge it."""
        seen = {expert: {sample.path for sample in samples} for expert, samples in self.calibrating.items()}
        by_expert = {
            expert: tuple(sample for sample in samples if sample.path not in seen.get(expert, ()))
            for expert, samples in self.by_expert.items()
        }
        return replace(self, by_expert=by_expert, are_held_out=True)

    def sha256(self, experts: Iterable[str]) -> str:
        """Digest of these experts' samples: paths, sizes and times of change.

        Of held-out samples also the calibration's images and format, on which the judged form depends.
        """
        names = sorted(experts)
        parts = [[expert, *_stamp(sample.path)] for expert in names for sample in self.of(expert)]
        if self.are_held_out:
            parts += [[FORMAT, expert, stamps_sha256(self.calibrating.get(expert, ()))] for expert in names]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def stamps_sha256(samples: Iterable[Sample]) -> str:
    """Digest of the images' paths, sizes and times of change."""
    return hashlib.sha256(json.dumps([_stamp(sample.path) for sample in samples]).encode()).hexdigest()


def described(samples: Sequence[Sample]) -> str:
    """Text such as "24 images from inbox/done"; "synthetic" for no samples."""
    if not samples:
        return SYNTHETIC
    folders = sorted({sample.folder for sample in samples})
    return f"{len(samples)} {'image' if len(samples) == 1 else 'images'} from {' and '.join(folders)}"


def is_synthetic(text: str) -> bool:
    return text.split(";")[0] == SYNTHETIC


class _Search:
    """Files of some folders: usable ones by component and label, and a tally of the others."""

    def __init__(self, config: LineConfig) -> None:
        self._config = config
        self._found: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)  # (label or shelf, component)
        self._unusable: dict[str, str] = {}  # file -> why
        self._looked_at = 0

    def look_into(self, folder: Path) -> None:
        """Search a given folder for labelled crops, or images named as the line's intake names them."""
        if is_stated(folder):
            for known in read_answers(folder, self._config.catalog.components):
                self._looked_at += 1
                self._add(folder, known)
            return
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder of samples - name one that holds <component>/<label>/*.png")
        namings = [(naming_of(section, self._config), section.max_pixels) for section in self._config.intake.folders]
        for relpath in files_below(folder):
            self._looked_at += 1
            answer = known_by_folder(folder, folder / relpath, self._config.catalog.components)
            is_named = answer is not None and answer.component is not None
            if not is_named and self._read_name(folder, relpath, namings, self._shown(folder)):
                continue
            if answer is not None and (is_named or len(self._config.catalog.components) == 1):
                self._unusable.pop(relpath, None)
                self._add(folder, answer)

    def _add(self, folder: Path, known: KnownAnswer) -> None:
        """A line of one component is asked about it where the answer names none."""
        component, *others = (known.component,) if known.component else self._config.catalog.components
        if others or component not in self._config.catalog.components:
            self._unusable[str(known.image)] = "it names no component of the line: add a column `component`"
            return
        label = known.label or ""
        self._found[label, component].append(Sample(known.image, component, label, self._shown(folder)))

    def look_into_intake(self, folder: Path, naming: Naming, max_pixels: int) -> None:
        """Search one of the line's own folders; it need not exist yet."""
        for relpath in files_below(folder):
            if naming.has_sidecars and relpath.lower().endswith(SUFFIX):
                continue
            self._looked_at += 1
            shelf = relpath.split("/")[0]
            shown = self._shown(folder / shelf if shelf in {DONE, NG} else folder)
            self._read_name(folder, relpath, [(naming, max_pixels)], shown)

    def choose(self, most: int, *, is_label_even: bool) -> LineSamples:
        """Samples of each expert in the order of ``_drawn``."""
        by_component: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
        for (_, component), samples in sorted(self._found.items()):
            by_component["", component] += samples
        mixes = {key: _spread(samples) for key, samples in by_component.items()}
        groups = {key: _spread(samples) for key, samples in self._found.items()} if is_label_even else mixes
        checked = Checked()
        by_expert, calibrating = {}, {}
        for expert in self._config.catalog.experts:
            routes = self._config.catalog.graph.routes
            own = {key: groups[key] for key in groups if any(step.expert == expert for step in routes[key[1]])}
            each = EACH_COMPONENT * len({component for _, component in own}) if is_label_even else 0
            sound = (sample for sample in _drawn(own, expert) if checked.is_sound(sample))
            if found := tuple(itertools.islice(sound, max(most, each) + MOST_CALIBRATING)):
                by_expert[expert] = found[: max(most, each)]
                calibrating[expert] = _calibrating(found)
        mix = {component: checked.left_of(samples, MOST_IN_MIX) for (_, component), samples in mixes.items()}
        return LineSamples(
            by_expert,
            tuple(str(error) for error in checked.broken.values()),
            {component: samples for component, samples in mix.items() if samples},
            calibrating,
        )

    def complaint(self, folder: Path, broken: Sequence[str]) -> str:
        """Error text for a folder without a usable image."""
        reasons = Counter(self._unusable.values())
        listed = [f"{count} of them: {reason}" for reason, count in reasons.most_common(NAMED_PROBLEMS)]
        if broken:
            listed.append(f"{len(broken)} broken: {'; '.join(broken[:NAMED_PROBLEMS])}")
        components = ", ".join(sorted(self._config.catalog.components)[:NAMED_PROBLEMS])
        return (
            f"{folder} holds no usable image: {self._looked_at} files were looked at"
            + "".join(f"; {each}" for each in listed)
            + f" - give a folder of <component>/<label>/*.png (components: {components}, ...), a table of file, label "
            "and component, or images named as the line's intake.folders[].pattern says, or with their sidecars"
        )

    def _read_name(self, folder: Path, relpath: str, namings: Sequence[tuple[Naming, int]], shown: str) -> bool:
        """False, with the reason, for a name that says no component."""
        reason = "the line has no intake folder to read its name by"
        for naming, max_pixels in namings:
            name = name_of(naming, folder / relpath, as_it_came(relpath))
            if isinstance(name, str):
                reason = name
                continue
            if (component := name["component"]) is None:
                reason = "it shows a whole board, which no expert judges: cut it, or give labelled crops"
                continue
            shelf = relpath.split("/")[0]
            found = self._found[shelf if shelf in {DONE, NG} else "", component]
            found.append(Sample(folder / relpath, component, None, shown, max_pixels))
            return True
        self._unusable[relpath] = reason
        return False

    def _shown(self, folder: Path) -> str:
        home = self._config.document.file.parent
        absolute = folder.absolute()
        return str(absolute.relative_to(home)) if absolute.is_relative_to(home) else str(folder)


class Checked:
    """Decodes each sample once for all experts. ``broken``: files that do not decode."""

    def __init__(self) -> None:
        self.broken: dict[Path, ImageError] = {}
        self._sound: set[Path] = set()

    def is_sound(self, sample: Sample) -> bool:
        """True where it decodes, within its intake's limit of pixels."""
        if sample.path not in self._sound and sample.path not in self.broken:
            try:
                read_image(sample.path, str(sample.path), sample.max_pixels)
            except ImageError as error:
                self.broken[sample.path] = error
            else:
                self._sound.add(sample.path)
        return sample.path in self._sound

    def left_of(self, samples: Iterable[Sample], most: int) -> tuple[Sample, ...]:
        return tuple(itertools.islice((sample for sample in samples if sample.path not in self.broken), most))


def _calibrating(found: Sequence[Sample]) -> tuple[Sample, ...]:
    """Samples for calibration: the last of each component and label (or shelf), in turn; at most half."""
    groups: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in found:
        groups[sample.label or sample.folder, sample.component].append(sample)
    halves = {key: samples[: (len(samples) - 1) // 2 : -1] for key, samples in groups.items()}
    return tuple(itertools.islice(_drawn(halves, ""), MOST_CALIBRATING))


def _stamp(path: Path) -> list[str | int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return [str(path)]
    return [str(path), found.st_size, found.st_mtime_ns]


def _spread(samples: Iterable[Sample]) -> list[Sample]:
    named = sorted(samples, key=lambda sample: sample.path)
    return [named[place] for place in sorted(range(len(named)), key=lambda place: place * GOLDEN % 1.0)]


def _drawn(groups: Mapping[tuple[str, str], Sequence[Sample]], seed: str) -> Iterator[Sample]:
    """Samples of each shelf in turn; of the shelf's components the one with the fewest so far, there and then on all.

    Equals come in an order that ``seed`` shuffles: what is left out does not depend on a component's name.
    """
    order = sorted(groups)
    random.Random(seed).shuffle(order)
    left = {key: iter(groups[key]) for key in order}
    seen: Counter[str | tuple[str, str]] = Counter()
    while left:
        for shelf in sorted({shelf for shelf, _ in left}):
            key = min((each for each in left if each[0] == shelf), key=lambda each: (seen[each], seen[each[1]]))
            if (sample := next(left[key], None)) is None:
                del left[key]
                continue
            seen.update([key, key[1]])
            yield sample
