"""`coserve rejudge`, and a candidate beside the present expert over an archive, in groups of images.

Guarantees: an expert is loaded once for a group, as the Engine collects the requests of each expert, and no age of a
request breaks this order (NO_HURRY_S). For an agent that serves the line on this box: its state is not locked, its
packed weights do not change; experts that are not packed yet are packed beside them, for this run only.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from contextlib import closing, contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING

from agent.commands.rejudging.agreement import Row, beside, compare_answers, new_row, write_page
from agent.commands.rejudging.archive import ArchivedImage, ArchiveQuery, find_images, source_of, stored_answers
from agent.config import LineConfig, line_of
from agent.deployment.build import Agent, AgentOptions, Progress, agent_with_requests
from agent.deployment.worker_manager import on_cluster
from agent.line_file.promotions import in_place
from agent.lines.promotion import shadow_of
from agent.records.database import refuse_root_beside_another
from agent.records.truth.figures import verdict_by
from agent.records.truth.reviewed import before_and_after, reviewed_results
from experts.errors import ConfigError
from experts.expert import Verdict
from experts.images import DEFAULT_MAX_PIXELS
from experts.packed.snapshot import snapshot
from experts.packed.weights import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from agent.runtime.images.sources import Frame
    from agent.runtime.requests import Requests
    from experts.graph import ExpertGraph

Images = list[ArchivedImage]

GROUP_IMAGES = 2000  # that an interruption costs at most; an expert is loaded in 1 s, and judges them in 10 s or more
GROUP_FRAMES = 16  # images that are cut: each stays decoded until its last part is judged
NO_HURRY_S = 86_400.0  # the largest value of max_overtake_s


def rejudge(config: LineConfig, query: ArchiveQuery, out: Path, progress: Progress, cluster: str | None = None) -> Row:
    """Judge an archive anew, into ``out``; returns the values of `--json`. Goes on where an earlier run ended.

    Raises ConfigError, AgentCrashed.
    """
    try:
        from agent.commands.rejudging.parts import known_keys, merged_rows, parts_of, write_part
    except ModuleNotFoundError as error:
        raise ConfigError("Parquet files need pyarrow - pip install 'coserve[cluster]'") from error
    where = on_cluster(config, cluster) if cluster else config
    _refuse_files(out, page := out.with_suffix(".html"))
    images, left_out = find_images(config, query)
    with patient_agent(where, progress) as (agent, requests), parts_of(out) as folder:
        weights = [(copy, packed.source_sha256) for copy, packed in sorted(agent.packed.items())]
        line = (config.document.values, config.layouts)
        made_with = {"line file": _digest(line), "weights": _digest(weights), "selection of images": _digest(query)}
        known = known_keys(folder, made_with)
        new = [image for image in images if image.subject.key not in known]
        resumed = len(images) - len(new)
        done = count(resumed + 1)
        for rows in judge(config, requests, new, lambda: progress("rejudge", next(done), len(images))):
            stored = stored_answers(config, [row["key"] for row in rows])
            write_part(folder, made_with, [beside(row, stored.get(row["key"])) for row in rows])
        truth = _Truth(config)
        compared = _compared(map(truth.noted, merged_rows(folder, out)), page, f"{config.line}: judged anew")
    return {"file": out, "resumed": resumed, "left_out": left_out, "reviewed": truth.figures(), **compared}


def rejudge_candidate(
    config: LineConfig, query: ArchiveQuery, weights: Path | None, page: Path | None, progress: Progress
) -> Row:
    """Judge an expert's images by their routes, with its candidate and with itself; returns the values of `--json`.

    ``weights``: the candidate's; None: its shadow is the candidate. Raises ConfigError, AgentCrashed.
    """
    _refuse_files(*filter(None, [page]))
    expert = str(query.expert)
    images, left_out = find_images(config, query)
    rows = _rows(candidate_line(config, expert, weights), expert, images, progress, "candidate")
    present = _rows(config, expert, images, progress, "present")
    reached = (key for key in rows if expert in {*rows[key]["experts"], *present[key]["experts"]})
    both = (beside(rows[key], present[key]) for key in reached)
    compared = _compared(both, page, f"{config.line}: candidate of {expert}")
    answers = {key: (_verdict_by(expert, present[key]), _verdict_by(expert, row)) for key, row in rows.items()}
    reviewed = before_and_after(config, expert, reviewed_results(config), answers)
    return {"file": None, "resumed": 0, "left_out": left_out, "reviewed": reviewed, **compared}


def candidate_line(config: LineConfig, expert: str, weights: Path | None) -> LineConfig:
    """The line as it would be with other weights of an expert, or with its shadow promoted. Raises ConfigError."""
    entries = config.document.values["experts"]
    if weights is not None:
        entry = entries[expert] | {"weights": str(weights.absolute())}
    else:
        entry = in_place(entries[expert], entries[shadow_of(config, expert)])
    return line_of(config.document.having(("experts", expert), entry, f"the candidate of {expert}"), {}, ())


@contextmanager
def patient_agent(config: LineConfig, progress: Progress) -> Iterator[tuple[Agent, Requests]]:
    """A started agent of the line, beside another or without one. Raises as ``build_agent``."""
    scheduling = config.scheduling.model_copy(update={"max_overtake_s": NO_HURRY_S})
    patient = config.model_copy(update={"scheduling": scheduling})
    refuse_root_beside_another(config.state)
    with (
        closing(SegmentStore(config.packed_folder)) as segments,
        snapshot(segments) as packed,
        agent_with_requests(patient, progress, AgentOptions(packed=packed)) as (agent, requests),
    ):
        agent.start()
        yield agent, requests


def judge(config: LineConfig, requests: Requests, images: Images, judged: Callable[[], None]) -> Iterator[list[Row]]:
    """Rows of each group, as it is ready. ``judged``: called for each image. Raises AgentCrashed."""
    limits = {each.max_pixels for each in config.intake.folders} | {each.max_pixels for each in config.intake.cameras}
    most_pixels = max(limits, default=DEFAULT_MAX_PIXELS)  # a result does not tell its source's
    for group in groups_of(images, config.catalog.graph):
        frames: dict[str, Frame] = {}
        for image in group:
            source = source_of(image, most_pixels, frames)
            requests.submit(source, component=image.subject.component, expert=image.subject.expert)
        ended = requests.collect(lambda *_: judged())
        yield [new_row(image, each.outcome) for image, each in zip(group, ended, strict=True)]


def groups_of(images: Images, graph: ExpertGraph) -> Iterator[Images]:
    """Groups of at most GROUP_IMAGES images, or of all parts of GROUP_FRAMES images; the most used expert's first."""

    def rank(image: ArchivedImage) -> tuple[int, str, str]:
        return -counts[first(image)], first(image), image.subject.component or ""

    def first(image: ArchivedImage) -> str:
        return image.subject.expert or graph.first_expert(image.subject.component or "") or ""

    counts = Counter(map(first, images))
    files: defaultdict[tuple[bool, str], Images] = defaultdict(list)
    for image in sorted(images, key=rank):
        is_cut = image.subject.box is not None
        files[is_cut, image.path if is_cut else image.subject.key].append(image)
    for kind, most in ((False, GROUP_IMAGES), (True, GROUP_FRAMES)):
        of_kind = [file for (is_cut, _), file in files.items() if is_cut is kind]
        for start in range(0, len(of_kind), most):
            yield sorted(chain.from_iterable(of_kind[start : start + most]), key=rank)


def _rows(config: LineConfig, expert: str, images: Images, progress: Progress, stage: str) -> dict[str, Row]:
    """Rows of all images by key. Raises ConfigError where the expert cannot run."""
    with patient_agent(config, progress) as (agent, requests):
        if (reason := agent.setup.broken.get(expert)) is not None:
            raise ConfigError(f"the {stage} version of {expert} cannot run: {reason}")
        done = count(1)
        groups = judge(config, requests, images, lambda: progress(stage, next(done), len(images)))
        return {row["key"]: row for group in groups for row in group}


def _compared(rows: Iterable[Row], page: Path | None, title: str) -> Row:
    """Figures of rows, and where the page of their flips is. Raises ConfigError."""
    figures, flips = compare_answers(rows)
    return {"page": page and write_page(page, title, figures, flips), **figures}


class _Truth:
    """New answers to reviewed images, as rows pass; then figures of each expert that judged one before and now."""

    def __init__(self, config: LineConfig) -> None:
        self._config = config
        self._reviewed = {each.result.subject.key: each for each in reviewed_results(config)}
        self._rows: dict[str, Row] = {}

    def noted(self, row: Row) -> Row:
        if row["key"] in self._reviewed:
            self._rows[row["key"]] = row
        return row

    def figures(self) -> list[Row]:
        experts = sorted({expert for row in self._rows.values() for expert in row["experts"]})
        return [figures for expert in experts for figures in self._of(expert)]

    def _of(self, expert: str) -> list[Row]:
        earlier = {key: self._reviewed[key].result for key in self._rows}
        answers = {
            key: (verdict_by(expert, earlier[key].experts, earlier[key].verdict), _verdict_by(expert, row))
            for key, row in self._rows.items()
        }
        return before_and_after(self._config, expert, self._reviewed.values(), answers)


def _verdict_by(expert: str, row: Row) -> Verdict | None:
    return verdict_by(expert, row["experts"], Verdict(row["verdict"]))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _refuse_files(*files: Path) -> None:
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists - name another file, or move it away")
        if not file.parent.is_dir():
            raise ConfigError(f"{file.parent} is no folder - make it, or name another file")
