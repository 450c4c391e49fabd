"""Judges an archive in groups, with the line's own agent: an expert is loaded once for all images of a group.

``judge(images of one group) -> answers`` is the contract. A judge holds no archive and no file of answers, so that it
can live in another process.

Groups follow the routes: images of the expert with the most images first. Within a group the Engine collects the
requests of each further expert behind those of the first; no age of a request breaks this order (NO_HURRY_S).

Guarantees, for an agent that serves the line on this box: its state is not locked, its packed weights do not change.
Experts that are not packed yet are packed beside them, for this run only.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.deployment.build import AgentOptions, agent_with_requests
from agent.records.database import refuse_root_beside_another
from agent.runtime.images.sources import EncodedImage, Frame, FramePart, ImageFile
from experts.packed.snapshot import snapshot
from experts.packed.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from agent.commands.rejudging.archive import ArchivedImage
    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.deployment.build import Agent
    from agent.runtime.requests import Requests
    from experts.graph import ExpertGraph

    Progress = Callable[[str, int, int], None]
    Group = Sequence[ArchivedImage]
    Answer = dict[str, Any]

GROUP_IMAGES = 2000  # that an interruption costs at most; an expert is loaded in 1 s, and judges them in 10 s or more
GROUP_FRAMES = 16  # images that are cut: each stays decoded until its last part is judged
NO_HURRY_S = 86_400.0  # the largest value of max_overtake_s


class LocalJudge:
    """Judges on this box. ``progress``: called with the number of answers since the start."""

    def __init__(self, agent: Agent, requests: Requests, progress: Callable[[int], None]) -> None:
        self.agent = agent
        self._requests = requests
        self._progress = progress
        self._judged = 0

    @property
    def weights(self) -> dict[str, str]:
        """sha256 of the weights behind the answers, by expert and precision."""
        return {copy: packed.source_sha256 for copy, packed in sorted(self.agent.packed.items())}

    def judge_groups(self, groups: Iterable[Group]) -> Iterator[tuple[Group, list[Answer]]]:
        """Groups with the answers to their images, as they are ready. Raises AgentCrashed."""
        for group in groups:
            yield group, self.judge(group)

    def judge(self, images: Group) -> list[Answer]:
        """Answers to the images of one group, in their order: verdict, label, score, reason, experts and the score of
        each. Raises AgentCrashed."""
        frames: dict[str, Frame] = {}
        for image in images:
            source: ImageFile | FramePart = ImageFile(Path(image.path), image.max_pixels)
            if image.box is not None:
                frame = frames.get(image.path) or frames.setdefault(image.path, _frame(image))
                source = FramePart(frame, image.box, f"{frame.name}#{image.ref}")
            self._requests.submit(source, component=image.component, expert=image.expert)
        ended = self._requests.collect(lambda done, _: self._progress(self._judged + done))
        self._judged += len(images)
        return [_answer(each.outcome) for each in ended]


@contextmanager
def local_judge(
    config: LineConfig, progress: Progress, judged: Callable[[int], None] = lambda _: None
) -> Iterator[LocalJudge]:
    """A judge on this box, beside an agent or without one. ``progress``: of its start. Raises as ``build_agent``."""
    scheduling = config.scheduling.model_copy(update={"max_overtake_s": NO_HURRY_S})
    refuse_root_beside_another(config.state)
    with closing(SegmentStore(config.packed_folder)) as segments, snapshot(segments) as packed:
        patient = replace(config, scheduling=scheduling)
        with agent_with_requests(patient, progress, AgentOptions(packed=packed)) as (agent, requests):
            agent.start()
            yield LocalJudge(agent, requests, judged)


def groups_of(
    images: Sequence[ArchivedImage], graph: ExpertGraph, most: int = GROUP_IMAGES
) -> Iterator[list[ArchivedImage]]:
    """Groups of at most ``most`` images, or of all parts of GROUP_FRAMES images; see the module."""

    def first(image: ArchivedImage) -> str:
        return image.expert or graph.first_expert(image.component or "") or ""

    counts = Counter(map(first, images))

    def rank(image: ArchivedImage) -> tuple[int, str, str]:
        return -counts[first(image)], first(image), image.component or ""

    whole = sorted((image for image in images if image.box is None), key=rank)
    for start in range(0, len(whole), most):
        yield whole[start : start + most]
    cut = sorted((image for image in images if image.box is not None), key=lambda image: image.path)
    frames = [list(parts) for _, parts in groupby(cut, key=lambda image: image.path)]
    for start in range(0, len(frames), GROUP_FRAMES):
        yield sorted((part for parts in frames[start : start + GROUP_FRAMES] for part in parts), key=rank)


def _frame(image: ArchivedImage) -> Frame:
    """Image to cut; a file that cannot be read is refused by its decoder, with the reason in its name."""
    path = Path(image.path)
    try:
        encoded = EncodedImage(path.read_bytes(), path.name, image.max_pixels)
    except OSError as error:
        encoded = EncodedImage(b"", f"{path.name} ({error.strerror})", image.max_pixels)
    return Frame(encoded, image.size)


def _answer(outcome: Outcome) -> Answer:
    answer = {name: getattr(outcome, name) for name in ("verdict", "label", "score", "reason")}
    steps = outcome.steps
    scores = [step.prediction.score for step in steps]
    return answer | {"experts": [step.expert for step in steps], "scores": scores}
