"""Experts of a line: `coserve experts list` and `compare`."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from agent.commands.progress import console_page
from agent.deployment.line_change import pair_sha256
from agent.deployment.packed_copies import packed_manifests
from agent.deployment.profile_in_use import bound_decodings, find_profile, scaled_experts, usage_of
from agent.lines.promotion import shadow_of
from agent.records.station.reviews import ReviewQuery
from agent.records.truth.reviewed import before_and_after, reviewed_results
from agent.records.truth.shadow_answers import Pair, answer_row, read_comparison, read_verdicts
from experts.backends import LLM
from experts.errors import ConfigError, LoadError
from experts.expert import Precision
from experts.packed.sources import is_there, sha256_of, size_bytes_of
from experts.sizes import mib

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.device_profile.records import StoredProfile
    from agent.records.truth.shadow_answers import Comparison, Side
    from experts.packed.manifests import Manifest


log = logging.getLogger(__name__)

SHOWN_IMAGES = 20


def packed_bytes(manifests: Iterable[Manifest]) -> int:
    return sum(segment.size_bytes for manifest in manifests for segment in manifest.packed.segments)


def expert_rows(config: LineConfig) -> list[dict[str, Any]]:
    """Row per expert, the most used first. ``usage``: the device profile's, computed without one. ``size_bytes``:
    packed; ``weights_bytes``: size of the source file or directory; None: missing."""
    manifests = packed_manifests(config)
    profile = _profile(config)
    usage = usage_of(config, profile)
    if profile is not None:
        profile = replace(profile, decodings=bound_decodings(config, profile, lambda _: Precision))
    scaled = scaled_experts(profile)
    graph = config.catalog.graph
    rows = [
        {
            "expert": name,
            "architecture": expert.architecture,
            "labels": list(expert.labels),
            "weights": str(expert.weights),
            "size_bytes": packed_bytes(manifests[name]) if manifests[name] else None,
            "weights_bytes": size_bytes_of(expert) if is_there(expert) else None,
            "usage": round(usage[name], 6),
            "routes": [
                *(route for route in config.catalog.components if name in graph.experts_of(route)),
                *(route for route, texts in config.catalog.texts.items() if name in texts.experts),
            ],
            "pin": expert.pin,
            "shadow": graph.shadows.get(name),
            "scaled_decoding": name in scaled,
        }
        for name, expert in config.catalog.experts.items()
    ]
    return sorted(rows, key=lambda row: (-float(str(row["usage"])), str(row["expert"])))


def print_experts(rows: list[dict[str, Any]]) -> None:
    titles = ("expert", "architecture", "packed", "usage", "proof", "labels", "routes")
    table = Table(*titles, box=None, header_style="bold")
    for row in rows:
        size = "not yet" if row["size_bytes"] is None else mib(row["size_bytes"])
        size += ", weights MISSING" if row["weights_bytes"] is None else ""
        pin = " (pinned)" if row["pin"] else ""
        shadow = f", {row['shadow']} in its shadow" if row["shadow"] else ""
        shadow += ", JPEGs decoded smaller" if row["scaled_decoding"] else ""
        labels, routes = ", ".join(row["labels"]), ", ".join(row["routes"])
        proof = "" if row["architecture"] == LLM else "unproven" if row["unproven"] else "proven"
        usage = f"{row['usage']:.4f}"
        table.add_row(row["expert"] + pin, row["architecture"], size, usage, proof, labels, routes + shadow)
    console_page().print(table)


def _profile(config: LineConfig) -> StoredProfile | None:
    try:
        return find_profile(config)
    except ConfigError as error:
        log.warning("usage_computed without the device profile: %s", error)
        return None


def comparison_of(config: LineConfig, expert: str) -> Comparison:
    """Answers of an expert and its shadow on the same images. Raises ConfigError without any."""
    shadow = shadow_of(config, expert)
    try:
        comparison = read_comparison(config.results_file, expert, shadow)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    if comparison is None:
        raise ConfigError(f"{shadow} has no image in common with {expert} yet - serve the line for a while first")
    return comparison


def reviewed_figures(config: LineConfig, pair: Pair) -> list[dict[str, Any]]:
    """Figures of an expert and its shadow over images that both judged and people reviewed; none without such."""
    reviewed = reviewed_results(config, ReviewQuery(expert=pair.expert))
    answers = read_verdicts(config.results_file, pair) if reviewed else {}
    return before_and_after(config, pair.expert, reviewed, answers)


def figures_of_promotion(config: LineConfig, expert: str) -> list[dict[str, Any]]:
    """``reviewed_figures`` of an expert's shadow as in the files now; none if other versions were compared."""
    try:
        pair = comparison_of(config, expert).pair
        expert_sha256, shadow_sha256 = (sha256_of(config.catalog.experts[name]) for name in (pair.expert, pair.shadow))
        terms = pair_sha256(config, pair.expert, pair.shadow)
        now = Pair(pair.expert, pair.shadow, expert_sha256, shadow_sha256, terms)
    except (ConfigError, LoadError):
        return []
    return reviewed_figures(config, pair) if now == pair else []


def comparison_row(comparison: Comparison) -> dict[str, Any]:
    pair = comparison.pair
    return {
        "expert": pair.expert,
        "shadow": pair.shadow,
        "weights": {"expert": pair.expert_sha256, "shadow": pair.shadow_sha256},
        "images": comparison.images,
        "agreeing": comparison.agreeing,
        "agreement": comparison.agreement,
        "flips": {"to_ng": comparison.flips_to_ng, "to_ok": comparison.flips_to_ok},
        "failed": comparison.failed,
        "dropped": comparison.dropped,
        "last_reason": comparison.last_reason,
        "scores": comparison.scores and asdict(comparison.scores),
        "seconds": comparison.seconds and asdict(comparison.seconds),
        "executors": {
            "expert": [asdict(each) for each in comparison.ran_on],
            "shadow": [asdict(each) for each in comparison.shadow_ran_on],
        },
        "differing": [answer_row(row) for row in comparison.differing],
    }


def print_comparison(comparison: Comparison, images: Path, reviewed: Sequence[str] = ()) -> None:
    """Print the figures, then the latest images with different answers. ``images``: folder of kept images;
    ``reviewed``: lines about people's reviews."""
    console = console_page()
    for line in (*_figures(comparison), *map(escape, reviewed)):
        console.print(line)
    if not comparison.differing:
        return
    shown = comparison.differing[-SHOWN_IMAGES:]
    console.print(f"\nImages that differ, the latest {len(shown)} of {len(comparison.differing)}:")
    table = Table("image", "component", comparison.pair.expert, comparison.pair.shadow, "kept as", box=None)
    for row in shown:
        table.add_row(
            row.image,
            row.component or "",
            _answer(row.answer),
            _answer(row.shadow_answer),
            "" if row.kept_as is None else str(images / row.kept_as),
        )
    console.print(table)


def _figures(comparison: Comparison) -> list[str]:
    pair, images = comparison.pair, comparison.images
    missing = f"the shadow failed on {comparison.failed}, and had no time or room for {comparison.dropped}"
    lines = [f"{pair.expert}, and {pair.shadow} in its shadow: {images} images seen by both; {missing}"]
    if comparison.last_reason is not None:
        lines.append(f"last reason     {comparison.last_reason}")
    if comparison.agreement is None or comparison.scores is None or comparison.seconds is None:
        return lines
    scores, seconds = comparison.scores, comparison.seconds
    return [
        *lines,
        f"agreement       {comparison.agreement:.2%}: {comparison.agreeing} of {images} have the same label",
        f"flips           {comparison.flips_to_ng} passed that would be NG, "
        f"{comparison.flips_to_ok} did not pass that would pass",
        f"mean score      {scores.expert:.4f}, shadow {scores.shadow:.4f}",
        f"median time     {seconds.expert * 1000:.2f} ms an image in its batch, shadow {seconds.shadow * 1000:.2f} ms "
        "alone",
        *_processors(comparison),
    ]


def _processors(comparison: Comparison) -> list[str]:
    """A note for different processors, whose times are not comparable."""
    expert, shadow = (sorted({each.processor for each in ran}) for ran in (comparison.ran_on, comparison.shadow_ran_on))
    if expert == shadow:
        return []
    return [f"ran on          {', '.join(expert)}, shadow {', '.join(shadow)}: the times are not comparable"]


def _answer(side: Side | None) -> str:
    if side is None:
        return ""
    end = "" if side.passes is None else ", passes" if side.passes else ", NG"
    return f"{side.label} {side.score:.3f}{end}"
