"""A generated line: experts with random weights, a trace with heavy-tailed popularity, a few images, a line file.

Guarantees: equal recipe and seed give equal bytes; no two experts share a tensor's bytes, so each has the cost of a
real line's expert; a line that does not fit on the disk is refused before the first write; ``removed_afterwards``
cleans up at any end (SIGKILL aside).

Weights are slices of one long run of random numbers, scaled layer by layer so that activations neither vanish nor
overflow. Drawing a ResNet101 takes about as long as copying its bytes, and it runs like a trained one.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import tempfile
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file

from agent.line_file.values import AUTO
from experts.backends import backend_for, family
from experts.backends.forms import form_of
from experts.backends.weight_files import saving
from experts.errors import ConfigError
from experts.expert import Expert, InputSpec, Precision
from experts.packed.packing import pack_line
from experts.packed.weights import DTYPE_BYTES, SegmentStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from numpy.typing import NDArray

    from agent.line_file.machine import GivenPrecision
    from experts.packed.weights import PackedExpert

    State = Mapping[str, NDArray[Any]]  # tensors of a fresh network, for which drawn values are put in

CLASSIFIER_LABELS = ("ok", "missing", "shifted")
DETECTOR_LABELS = ("aligned", "turned")
DETECTORS = ("yolov5m", "yolov5l")  # architectures
EVERY_S = 0.004  # an arrival
SIGMA = 1.2  # of the log-normal popularity of components
EVERY_DETECTED = 3  # arbitrary: every third component has a detector behind its classifier, if there are detectors
LARGEST_QUANTITY = 1000  # of one component on the generated board
WORKSPACE_BATCHES, WORKSPACE_IMAGES = 4, 8  # batches at once, and images of each, that the workspace is made for
NOISE = 0.01  # on constants of a fresh network (norms, biases), so that no two experts share them
EXPERT_STEP, TENSOR_STEP = 9973, 7919  # in the run of random numbers, from expert to expert and tensor to tensor
HEADER_BYTES = 1 << 18  # of a .safetensors file, at most; and of a packed one's manifest
FP32_BYTES = DTYPE_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class LineRecipe:
    """A line of components with a classifier each; some have a detector behind it.

    ``memory_for``: experts of the largest kind that fit beside the workspaces, in ``precision`` (auto: in fp32).
    """

    classifiers: int = 40
    architecture: str = "resnet101"
    detectors: int = 0
    requests: int = 240
    seed: int = 0
    memory_for: int = 12
    precision: GivenPrecision = Precision.FP32
    classifier_px: int = 224
    detector_px: int = 640
    images: int = 8

    @property
    def unprofiled(self) -> Precision:
        return Precision.FP32 if self.precision == AUTO else Precision(self.precision)

    def __post_init__(self) -> None:
        counts = (self.classifiers, self.requests, self.memory_for, self.images)
        if min(counts) < 1 or self.detectors < 0:
            raise ConfigError("a generated line has at least one classifier, request, image, and room for one expert")


@dataclass(frozen=True, slots=True)
class GeneratedLine:
    """Files of a generated line, and the parts of its memory. ``footprint_bytes``: the largest expert's."""

    line: Path
    trace: Path
    footprint_bytes: int
    expert_bytes: int
    workspace_bytes: int
    written_bytes: int


def generate_line(folder: Path, recipe: LineRecipe) -> GeneratedLine:
    """Write line.yaml, weights, images and trace.jsonl into an empty or new folder.

    Raises ConfigError for a folder that is not empty, an architecture that cannot be built, and a disk without room for
    the weights and their packed form; OSError. The folder is left empty then.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a new folder, nothing is overwritten")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder, nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _generate_line(folder, recipe)
    except BaseException:
        for each in folder.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        raise


def _generate_line(folder: Path, recipe: LineRecipe) -> GeneratedLine:
    with tempfile.TemporaryDirectory(prefix="networks-", dir=folder) as scratch:
        names = dict.fromkeys((recipe.architecture, *DETECTORS[: recipe.detectors]))
        tensors = {name: _fresh_tensors(name, Path(scratch), recipe.classifier_px) for name in names}
    count = recipe.classifiers + recipe.detectors
    sizes_bytes = {name: _size_bytes(each) for name, each in tensors.items()}
    detector_bytes = max(sizes_bytes.values())  # of either architecture, at most
    weights_bytes = recipe.classifiers * sizes_bytes[recipe.architecture] + recipe.detectors * detector_bytes
    packed_bytes = weights_bytes * form_of(recipe.unprofiled).dtype.itemsize // FP32_BYTES + count * HEADER_BYTES
    require_disk(folder, weights_bytes + packed_bytes, f"{count} experts and their packed form")
    classifier_size, detector_size = (recipe.classifier_px,) * 2, (recipe.detector_px,) * 2
    experts = [
        *(_expert(folder, f"cls/{n:03d}", recipe.architecture, classifier_size) for n in range(recipe.classifiers)),
        *(
            _expert(folder, f"det/{n:03d}", DETECTORS[n % len(DETECTORS)], detector_size)
            for n in range(recipe.detectors)
        ),
    ]
    written_bytes = _write_weights(experts, tensors, recipe.seed)
    os.sync()  # pending writes would slow down the next measurement
    footprint_bytes, workspace_bytes = _sizes(folder, experts, recipe.unprofiled)
    quantities = drawn_quantities(recipe.classifiers, recipe.seed)
    expert_bytes = recipe.memory_for * footprint_bytes
    _write_line(folder / "line.yaml", experts, quantities, recipe, (expert_bytes, workspace_bytes))
    images = _write_images(folder, recipe)
    _write_trace(folder / "trace.jsonl", quantities, images, recipe)
    return GeneratedLine(
        folder / "line.yaml", folder / "trace.jsonl", footprint_bytes, expert_bytes, workspace_bytes, written_bytes
    )


def drawn_quantities(components: int, seed: int) -> dict[str, int]:
    """Number of each component on a board, heavy-tailed."""
    chance = random.Random(seed)
    popularity = [chance.lognormvariate(0, SIGMA) for _ in range(components)]
    scale = LARGEST_QUANTITY / max(popularity)
    return {f"part-{number:03d}": max(round(each * scale), 1) for number, each in enumerate(popularity)}


@contextmanager
def removed_afterwards(directory: Path, prefix: str = "generated-") -> Iterator[Path]:
    """A new folder in ``directory``, removed with all it holds also after Ctrl-C and SIGTERM."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _interrupt)
            stack.callback(signal.signal, signal.SIGTERM, before)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        stack.callback(shutil.rmtree, folder)
        yield folder


def require_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises ConfigError when the disk under ``folder`` has fewer bytes free."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{folder}: {what} need {needed_bytes} bytes ({needed_bytes / 1e9:.1f} GB), {free_bytes} bytes "
            f"({free_bytes / 1e9:.1f} GB) are free: make room, name a folder on another disk, or ask for fewer experts"
        )


def _expert(folder: Path, expert: str, architecture: str, size: tuple[int, int]) -> Expert:
    is_detector = family(architecture) == "detector"
    return Expert(
        expert,
        architecture,
        folder / "weights" / f"{expert.replace('/', '-')}.safetensors",
        DETECTOR_LABELS if is_detector else CLASSIFIER_LABELS,
        InputSpec(*size, "unit" if is_detector else "imagenet"),
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one does not cut the removal short
    raise SystemExit(128 + number)


def write_experts(folder: Path, architecture: str, count: int, size: tuple[int, int] | None = None) -> list[Expert]:
    """Write experts of one architecture, each with separate weights, below ``folder``.

    ``size``: height and width of their images; None: as on a generated line. Raises as ``generate_line`` does.
    """
    recipe = LineRecipe()
    px = recipe.detector_px if family(architecture) == "detector" else recipe.classifier_px
    size = size or (px, px)
    with tempfile.TemporaryDirectory(prefix="networks-", dir=folder) as scratch:
        tensors = {architecture: _fresh_tensors(architecture, Path(scratch), size[0])}
    require_disk(folder, 2 * count * _size_bytes(tensors[architecture]), f"{count} experts and their packed form")
    experts = [_expert(folder, f"one/{number:03d}", architecture, size) for number in range(count)]
    _write_weights(experts, tensors, seed=0)
    return experts


def _fresh_tensors(architecture: str, scratch: Path, px: int) -> State:
    """State dict of a fresh network, for images of ``px``. Raises ConfigError for other than classifiers, detectors."""
    kind = family(architecture)
    try:
        if kind == "classifier":
            from experts.backends.vision.classifier import write_random_weights

            path = scratch / f"{architecture}.safetensors"
            write_random_weights(path, architecture, len(CLASSIFIER_LABELS), seed=0, image_size=px)
            loaded: State = load_file(path)
            return loaded
        if kind == "detector":
            from experts.backends.vision.detector import build_trainable

            state = build_trainable(architecture, len(DETECTOR_LABELS)).state_dict()
            return {name: tensor.numpy().copy() for name, tensor in state.items()}
    except ValueError as error:
        raise ConfigError(f"{architecture}: {error}") from error
    raise ConfigError(f"{architecture}: weights are generated for classifiers and YOLO detectors only")


def _drawn(name: str, value: NDArray[Any], noise: NDArray[np.float32]) -> NDArray[Any]:
    """Random weights of layers, each row of about unit length; norms and biases with a little noise."""
    if value.dtype != np.float32 or not value.ndim:
        return value
    if name.endswith("dfl.conv.weight"):
        return value  # a YOLO's bins are constants, not weights
    drawn = noise.reshape(value.shape)
    if value.ndim > 1:
        drawn = drawn / np.float32(math.sqrt(max(value.size // value.shape[0], 1)))
    else:
        drawn = value + np.float32(NOISE) * (np.abs(drawn) if name.endswith("running_var") else drawn)
    return drawn.astype(np.float32, copy=False)


def _size_bytes(state: State) -> int:
    return sum(value.nbytes for value in state.values()) + HEADER_BYTES


def _write_weights(experts: Sequence[Expert], tensors: Mapping[str, State], seed: int) -> int:
    """Write tensors as slices of one run of random numbers; no two experts have equal slices at a tensor."""
    largest = max(value.size for state in tensors.values() for value in state.values())
    length = largest + len(experts) * EXPERT_STEP + max(map(len, tensors.values())) * TENSOR_STEP
    run = np.random.default_rng(seed).standard_normal(length, dtype=np.float32)
    experts[0].weights.parent.mkdir()
    for number, expert in enumerate(experts):
        drawn = {
            name: _drawn(name, value, run[number * EXPERT_STEP + position * TENSOR_STEP :][: value.size])
            for position, (name, value) in enumerate(tensors[expert.architecture].items())
        }
        with saving(expert.weights):
            save_file(drawn, expert.weights)
    return sum(expert.weights.stat().st_size for expert in experts)


def packed_or_raised(expert: Expert, precision: Precision, store: SegmentStore) -> PackedExpert:
    """Raises as the backend does for an expert that cannot be packed."""
    report = pack_line([expert], lambda _: {precision}, store)
    for error in report.failed.values():
        raise error
    return report.packed[expert.id][precision]


def _sizes(folder: Path, experts: Sequence[Expert], precision: Precision) -> tuple[int, int]:
    """Bytes of the largest expert in memory, and of the workspace, by packing one expert of each architecture."""
    firsts = list({expert.architecture: expert for expert in reversed(experts)}.values())
    with closing(SegmentStore(folder / "state" / "packed")) as store:
        packed = [packed_or_raised(expert, precision, store) for expert in firsts]
    footprint_bytes = max(sum(segment.slot_bytes for segment in form.segments) for form in packed)
    batch_bytes = max(
        backend_for(expert.architecture).workspace_bytes(expert, precision, WORKSPACE_IMAGES) for expert in firsts
    )
    return footprint_bytes, WORKSPACE_BATCHES * batch_bytes


def _write_line(
    path: Path, experts: Sequence[Expert], quantities: Mapping[str, int], recipe: LineRecipe, memory: tuple[int, int]
) -> None:
    expert_bytes, workspace_bytes = memory
    budget = f"{expert_bytes + workspace_bytes}B"
    classifiers, detectors = experts[: recipe.classifiers], experts[recipe.classifiers :]
    document = {
        "line": "generated",
        "state": "./state",
        "experts": {
            expert.id: {
                "architecture": expert.architecture,
                "weights": str(expert.weights.relative_to(path.parent)),
                "labels": list(expert.labels),
                "input": {"size": [expert.pixels.height, expert.pixels.width], "normalize": expert.pixels.normalize},
            }
            for expert in experts
        },
        "routes": {
            component: _route(number, classifiers[number], detectors) for number, component in enumerate(quantities)
        },
        "boards": {"generated": {"components": dict(quantities), "takt_s": 180}},
        "memory": {"host": budget, "device": budget, "workspace": f"{workspace_bytes}B"},
        "precision": str(recipe.precision),
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def _route(number: int, classifier: Expert, detectors: Sequence[Expert]) -> list[dict[str, Any]]:
    """Route of a component; a classifier before a detector lets every image pass."""
    if not detectors or number % EVERY_DETECTED:
        return [{"expert": classifier.id, "pass": [CLASSIFIER_LABELS[0]]}]
    detector = detectors[number // EVERY_DETECTED % len(detectors)]
    return [
        {"expert": classifier.id, "pass": list(CLASSIFIER_LABELS)},
        {"expert": detector.id, "pass": [DETECTOR_LABELS[0]]},
    ]


def _write_images(folder: Path, recipe: LineRecipe) -> list[str]:
    chance = np.random.default_rng(recipe.seed)
    names = [f"images/{number:02d}.png" for number in range(recipe.images)]
    (folder / "images").mkdir()
    for name in names:
        pixels = synthetic_pixels(chance, recipe.classifier_px, recipe.classifier_px)
        Image.fromarray(pixels).save(folder / name)
    return names


def synthetic_pixels(chance: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """A picture of one colour under noise, (height, width, 3)."""
    colour = chance.integers(0, 256, 3)
    noise = chance.integers(-60, 61, (height, width, 3))
    pixels: NDArray[np.uint8] = np.clip(colour + noise, 0, 255).astype(np.uint8)
    return pixels


def _write_trace(path: Path, quantities: Mapping[str, int], images: Sequence[str], recipe: LineRecipe) -> None:
    chance = random.Random(recipe.seed + 1)
    components = chance.choices(list(quantities), list(quantities.values()), k=recipe.requests)
    lines = (
        {"t": round(number * EVERY_S, 6), "component": component, "image": images[number % len(images)]}
        for number, component in enumerate(components)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
