"""`coserve rejudge`, and a candidate beside the present expert over an archive."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from agent.commands.experts import STAYING
from agent.commands.rejudging.agreement import AnswersCompared, answer_row, compare_answers
from agent.commands.rejudging.archive import find_images, stored_answers
from agent.commands.rejudging.flips_page import write_page
from agent.commands.rejudging.judging import GROUP_IMAGES, groups_of, local_judge
from agent.commands.rejudging.parts import answer_parts, refuse_file, require_parquet, rows_of
from agent.config import line_of
from agent.deployment.workforce import on_cluster
from experts.document import suggestion
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

    from agent.commands.rejudging.archive import Archive, ArchiveQuery
    from agent.commands.rejudging.judging import LocalJudge, Progress
    from agent.config import LineConfig

STAGE = "rejudge"


@dataclass(frozen=True, slots=True)
class Rejudged:
    """Result of a run. ``resumed``: images whose answers an earlier run had written. ``page``: None without flips."""

    file: Path | None
    page: Path | None
    compared: AnswersCompared
    left_out: Counter[str]
    resumed: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.file and str(self.file),
            "page": self.page and str(self.page),
            "resumed": self.resumed,
            "left_out": dict(self.left_out),
            **self.compared.as_json(),
        }


def rejudge(
    config: LineConfig,
    query: ArchiveQuery,
    out: Path,
    progress: Progress,
    cluster: str | None = None,
    images_at_once: int = GROUP_IMAGES,
) -> Rejudged:
    """Judge an archive, write ``out``, and compare with the stored verdicts. Goes on where an earlier run ended.

    An agent may serve the line meanwhile. Raises ConfigError, AgentCrashed.
    """
    require_parquet()
    where = config if cluster is None else on_cluster(config, cluster)
    page = out.with_suffix(".html")
    refuse_file(out)
    refuse_file(page)
    archive = find_images(config, query)
    resumed = 0

    def judged(count: int) -> None:
        progress(STAGE, resumed + count, len(archive.images))

    with (
        local_judge(where, progress, judged) as judge,
        answer_parts(out, _made_with(config, query, judge)) as parts,
    ):
        known = parts.keys()
        images = [image for image in archive.images if image.key not in known]
        resumed = len(archive.images) - len(images)
        for group, answers in judge.judge_groups(groups_of(images, config.catalog.graph, images_at_once)):
            parts.write(list(map(answer_row, group, answers, stored_answers(config, group))))
        parts.merge()
    compared = compare_answers(rows_of(out))
    is_written = _write_flips(page, f"{config.line}: judged anew", compared)
    return Rejudged(out, page if is_written else None, compared, archive.left_out, resumed)


def rejudge_candidate(
    config: LineConfig, query: ArchiveQuery, weights: Path | None, page: Path | None, progress: Progress
) -> Rejudged:
    """Judge an expert's images by their routes, with the expert and then with its candidate; compare both.

    ``weights``: the candidate's; None: its shadow is the candidate. Raises ConfigError, AgentCrashed.
    """
    if page is not None:
        refuse_file(page)
    candidate = candidate_line(config, str(query.expert), weights)
    archive = find_images(config, query)
    given = _answers(candidate, query, archive, progress, "candidate")
    before = _answers(config, query, archive, progress, "present")
    compared = compare_answers(
        answer_row(image, new, old)
        for image, new, old in zip(archive.images, given, before, strict=True)
        if query.expert in {*new["experts"], *old["experts"]}
    )
    is_written = page is not None and _write_flips(page, f"{config.line}: candidate of {query.expert}", compared)
    return Rejudged(None, page if is_written else None, compared, archive.left_out)


def candidate_line(config: LineConfig, expert: str, weights: Path | None) -> LineConfig:
    """The line as it would be with other weights of an expert, or with its shadow promoted. Raises ConfigError."""
    if expert not in config.catalog.experts:
        raise ConfigError(f"no expert {expert!r} - {suggestion(expert, config.catalog.experts)}")
    entries = config.document.values["experts"]
    if weights is not None:
        if not weights.exists():
            raise ConfigError(f"{weights}: no such file - name the candidate's weights")
        entry = entries[expert] | {"weights": str(weights.absolute())}
    elif (shadow := config.catalog.graph.shadows.get(expert)) is not None:
        stays = {key: entries[expert][key] for key in STAYING if key in entries[expert]}
        entry = {key: value for key, value in entries[shadow].items() if key not in STAYING} | stays
    else:
        raise ConfigError(f"{expert} has no shadow - name it as `shadow:` of its entry, or give --weights")
    return line_of(config.document.having(("experts", expert), entry, f"the candidate of {expert}"), {})


def _answers(
    config: LineConfig, query: ArchiveQuery, archive: Archive, progress: Progress, stage: str
) -> list[dict[str, Any]]:
    """Answers to all images of an archive, in its order. Raises ConfigError where the query's expert cannot run."""
    found: dict[str, dict[str, Any]] = {}
    with local_judge(config, progress, lambda count: progress(stage, count, len(archive.images))) as judge:
        if (reason := judge.agent.setup.broken.get(str(query.expert))) is not None:
            raise ConfigError(f"the {stage} version of {query.expert} cannot run: {reason}")
        for group, answers in judge.judge_groups(groups_of(archive.images, config.catalog.graph)):
            found.update(zip((image.key for image in group), answers, strict=True))
    return [found[image.key] for image in archive.images]


def _made_with(config: LineConfig, query: ArchiveQuery, judge: LocalJudge) -> dict[str, str]:
    """What parts of one file have in common, by the name in a refusal."""
    selection = json.dumps(asdict(query), default=str)
    weights = hashlib.sha256(json.dumps(judge.weights).encode()).hexdigest()
    line = hashlib.sha256(json.dumps([config.document.values, str(config.layouts)], default=str).encode()).hexdigest()
    return {"line file": line, "weights": weights, "selection of images": selection}


def _write_flips(page: Path, title: str, compared: AnswersCompared) -> bool:
    """Write the page of flips; False without any. Raises ConfigError if the disk refuses."""
    try:
        if compared.flips:
            write_page(page, title, compared)
    except OSError as error:
        raise ConfigError(f"{page}: {error.strerror or error} - everything else is written") from error
    return bool(compared.flips)
