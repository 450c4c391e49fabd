"""One-off work on a line without its agent: judge given images, hash packed weights."""

from __future__ import annotations

import logging
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.commands.experts import packed_bytes
from agent.commands.judged_images import judged_rows
from agent.deployment.build import AS_SERVED, AgentOptions, agent_with_requests, deployment_of, packed_as_proven
from agent.deployment.packed_copies import doubts_of, packed_manifests, proven_copies
from agent.doors.desk import AnomalyView, VerdictView
from agent.faults.errors import AlreadyRunning
from agent.records.database import refuse_root_beside_another, state_held
from agent.subject import CALLERS, Subject
from experts.errors import ConfigError, ExpertError
from experts.packed.manifests import ManifestFolder
from experts.packed.snapshot import snapshot
from experts.packed.weights import SegmentStore
from experts.thresholds.map_pictures import map_png

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from experts.packed.manifests import Manifest

log = logging.getLogger(__name__)

NOT_PACKED = "not packed yet: the agent packs it when it starts"


def inspect_images(
    config: LineConfig,
    images: Sequence[Path],
    component: str,
    progress: Callable[[str, int, int], None],
    pictures: Path | None = None,
) -> list[dict[str, Any]]:
    """One row per image, in order. ``pictures``: folder for a picture of each image, the row's ``picture``. An agent
    may run on this line meanwhile. A fault of an image is its row's reason. Raises ConfigError for a component without
    a route, and AgentCrashed."""
    if component not in config.catalog.components:
        if component in config.catalog.texts or component in config.catalog.experts:
            raise ConfigError(f"{component} is not a component - use `coserve generate` for language models")
        known = ", ".join(sorted(config.catalog.components)) or "none, as no expert takes images"
        raise ConfigError(f"no route for component {component!r} - this line knows {known}")
    with _packed_weights(config, progress) as packed:
        judged = _judged(config, images, component, progress, packed)
    return judged_rows(images, component, judged, pictures)


def verify_line(
    config: LineConfig, progress: Callable[[str, int, int], None], names: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Hash the packed weights of these experts, default all of them. ``ok`` is None for one that is not packed yet."""
    rows = []
    folder = ManifestFolder(config.packed_folder / "manifests")
    wanted = config.catalog.experts if names is None else names
    packed = {name: manifests for name, manifests in packed_manifests(config).items() if name in wanted}
    with closing(SegmentStore(config.packed_folder)) as segments:
        for number, (name, manifests) in enumerate(packed.items(), start=1):
            progress("verify", number, len(packed))
            damage = [found for found in (_damage(manifest, folder, segments) for manifest in manifests) if found]
            rows.append(
                {
                    "expert": name,
                    "ok": not damage if manifests else None,
                    "reason": "; ".join(damage) or (None if manifests else NOT_PACKED),
                    "size_bytes": packed_bytes(manifests),
                    "source_sha256": next((manifest.packed.source_sha256 for manifest in manifests), None),
                }
            )
    return rows


def _damage(manifest: Manifest, folder: ManifestFolder, segments: SegmentStore) -> str | None:
    packed = manifest.packed
    try:
        segments.program(packed)
        for segment in packed.segments:
            segments.verify(segment, packed.expert)
    except ExpertError as error:
        now = folder.read(packed.expert, packed.precision)
        if now == manifest:
            return error.message
        return None if now is None else _damage(now, folder, segments)  # packed again by an agent that is starting
    return None


@contextmanager
def _packed_weights(config: LineConfig, progress: Callable[[str, int, int], None]) -> Iterator[Path]:
    refuse_root_beside_another(config.state)
    with closing(SegmentStore(config.packed_folder)) as segments:
        try:
            with state_held(config.state):
                packed_as_proven(deployment_of(config, segments.directory, AS_SERVED), segments, progress)
        except AlreadyRunning:
            log.info("inspecting beside a running agent: its packed weights stay unchanged")
        with snapshot(segments) as packed:
            yield packed


def _judged(
    config: LineConfig, images: Sequence[Path], component: str, progress: Callable[[str, int, int], None], packed: Path
) -> list[VerdictView]:
    with agent_with_requests(config, progress, AgentOptions(packed=packed)) as (agent, requests):
        agent.start()
        for image in images:
            requests.submit(image, component=component)
        ended = requests.collect(partial(progress, "inspect"))
        doubts = doubts_of(config, proven_copies(config, agent.served).lacks)
    answered = zip(images, ended, strict=True)
    return [_judged_image(image, doubts.applied(one.outcome), one.at_s - one.submitted_s) for image, one in answered]


def _judged_image(image: Path, outcome: Outcome, seconds: float) -> VerdictView:
    steps = [(step.expert, step.prediction) for step in outcome.steps]
    found = ((expert, prediction.anomaly) for expert, prediction in steps)
    return VerdictView(
        Subject(str(image), CALLERS, str(image), datetime.now(UTC)),
        outcome.verdict,
        label=outcome.label,
        score=outcome.score,
        reason=outcome.reason,
        experts=tuple(expert for expert, _ in steps),
        seconds=seconds,
        boxes=tuple(box for _, prediction in steps for box in prediction.boxes),
        anomalies=tuple(
            AnomalyView(expert, each.score, each.threshold, None if each.map is None else map_png(each.map))
            for expert, each in found
            if each is not None
        ),
        outputs=tuple(output for _, prediction in steps for output in prediction.outputs),
    )
