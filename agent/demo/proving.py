"""Proof of a demo's experts: their networks' own answers on held-back crops, and the agent's beside them.

The answers come from the trainer's side: a classifier's network in torch, and the exported graph of the others, on
pictures as the trainer makes them. Nothing of the serving backends takes part.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import onnxruntime
import torch
from PIL import Image
from safetensors.torch import load_file

from agent.config import read_line
from agent.demo.line import crops_of
from agent.demo.rendering.components import COMPONENTS, OK
from agent.demo.rendering.render import render_panels
from agent.demo.training.learning import beside_one_another
from agent.demo.training.network import INPUT_PX, normalised, pictures, resnet
from agent.deployment.packed_copies import keep_proof, packed_manifests
from experts.backends.ort.export import IMAGES
from experts.expert import Precision, Task
from experts.proving.answers import KnownAnswer, KnownBox, best_label, keep_answers
from experts.proving.comparing import answers_of
from experts.proving.judging import compared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from agent.demo.training.crops import LabelledCrop
    from agent.demo.training.train import TrainedLine
    from agent.line_file.proofs import Proof
    from experts.expert import Expert
    from experts.graph import RouteStep

CHECKS = "checks"  # in a demo's folder
BY = "coserve demo"
SHOWN_TO_DETECTORS = 4


def render_held_back(seed: int, threads: int) -> list[LabelledCrop]:
    """A good part and a defect of each component; the experts never saw them."""
    parts = [
        (each, next(label for label in each.labels if (label == OK) is is_ok))
        for each in COMPONENTS
        for is_ok in (True, False)
    ]
    return [each for board in render_panels(parts, seed + 1, threads) for each in crops_of(board)]


def write_answers(folder: Path, trained: TrainedLine, crops: Iterable[LabelledCrop]) -> TrainedLine:
    """Write ``checks/``: answers on one good and one bad crop of each component. The experts know where theirs are."""
    chosen = [*{(each.component, each.label == OK): each for each in crops}.values()]

    def written(expert: Expert) -> Expert:
        own, place = _shown_to(expert, trained.routes, chosen), folder / CHECKS / expert.id
        if not own:  # of crops that are given, none was held back: it stays unproven
            return expert
        with TemporaryDirectory(prefix="coserve-demo-") as scratch:
            files = [Path(scratch) / f"{each.component}-{each.label}.png" for each in own]
            for file, each in zip(files, own, strict=True):
                Image.fromarray(each.pixels).save(file, compress_level=1)
            answers = zip(_answers(expert, own), files, strict=True)
            keep_answers([replace(answer, image=file) for answer, file in answers], place)
        return replace(expert, check=place)

    return replace(trained, experts=tuple(beside_one_another(written, trained.experts)))


def prove(line_file: Path, progress: Callable[[str, int, int], None]) -> list[Proof]:
    """Compare each expert of the line with its answers, and keep the proofs in the line's state."""
    config = read_line(line_file, environment={})
    experts = [expert for expert in config.catalog.experts.values() if expert.check is not None]
    packed, proofs = packed_manifests(config), []

    def proven(expert: Expert) -> Proof:
        served = Precision.FP32, packed[expert.id][0].source.sha256
        return keep_proof(config, expert.id, served, compared(expert, answers_of(expert)), (BY, ""))

    for proof in beside_one_another(proven, experts):
        proofs.append(proof)
        progress("prove experts", len(proofs), len(experts))
    return proofs


def _shown_to(
    expert: Expert, routes: Mapping[str, Sequence[RouteStep]], crops: Sequence[LabelledCrop]
) -> list[LabelledCrop]:
    components = {name for name, steps in routes.items() if any(step.expert == expert.id for step in steps)}
    return [each for each in crops if each.component in components][:SHOWN_TO_DETECTORS]


def _answers(expert: Expert, crops: Sequence[LabelledCrop]) -> list[KnownAnswer]:
    """Answers whose images are to be written."""
    images = pictures(crops)
    if expert.architecture != "onnx":
        with torch.device("meta"):  # no weights are drawn, which takes longer than these answers
            network = resnet(expert.labels).eval()
        network.load_state_dict(load_file(expert.weights), assign=True)
        with torch.inference_mode():
            shares = network(normalised(images)).float().softmax(1)
        return [_of_shares(expert, each) for each in shares]
    run = onnxruntime.InferenceSession(expert.weights, providers=["CPUExecutionProvider"]).run
    if expert.task is Task.ANOMALY:
        maps = run(None, {IMAGES: normalised(images).contiguous().numpy()})[0]
        return [KnownAnswer(Path(), anomaly=float(each.max())) for each in maps]
    boxes = run(None, {IMAGES: (images.float() / 255.0).numpy()})[0]
    return [
        _of_box(expert, torch.from_numpy(each[:, 0]), each_crop) for each, each_crop in zip(boxes, crops, strict=True)
    ]


def _of_shares(expert: Expert, shares: Tensor) -> KnownAnswer:
    scores = tuple(zip(expert.labels, shares.tolist(), strict=True))
    return KnownAnswer(Path(), *max(scores, key=lambda pair: pair[1]), scores)


def _of_box(expert: Expert, answer: Tensor, shown: LabelledCrop) -> KnownAnswer:
    """The one box of a detector: centre and size in pixels of the picture, then a score for each label."""
    height, width = (side / INPUT_PX for side in shown.pixels.shape[:2])
    x, y, across, down = answer[:4].tolist()
    score, number = answer[4:].max(0)
    corners = ((x - across / 2) * width, (y - down / 2) * height, (x + across / 2) * width, (y + down / 2) * height)
    boxes = (KnownBox(expert.labels[int(number)], *corners, score=float(score)),)
    return KnownAnswer(Path(), best_label(boxes), boxes=boxes)
