"""Output of `coserve profile`: a table for people, an object for scripts, and charts as PNG.

Guarantees: every figure is read from the stored profile; a chart without measured data is not drawn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from agent.runtime.measuring.fits import typical_s
from experts.sizes import MEBIBYTE, mib
from profiler.charts import Labels, Series, line_chart
from profiler.tables import folded, folded_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import JustifyMethod

    from agent.device_profile.records import Agreement, ImageDecoding, KindProfile, SearchTrial, StoredProfile

COLUMNS: dict[str, JustifyMethod] = {
    "kind": "left", "on": "left", "precision": "left", "K ms": "right", "B ms": "right", "fit": "right",
    "batch": "right", "weights": "right", "per image": "right", "SSD ms": "right", "agrees with fp32": "left",
}  # fmt: skip
KIND_KEYS = (
    "precision", "threads", "K_s", "B_s", "fit_error", "max_batch", "weight_bytes", "workspace_base_bytes",
    "K_prompt_s", "K_output_s", "lease_bytes", "samples",
)  # fmt: skip
MIB = ",.1f"
NORMALIZATIONS = {"imagenet", "unit"}
MOST_CURVES = 6  # in one chart: more would be indistinguishable
NAMED_EXPERTS = 6  # in one line of the table; all of them are in the JSON
MOST_TRIALS = 12  # of one search in the table; the chart and the database hold all of them


def profile_json(profile: StoredProfile) -> dict[str, Any]:
    """Object of `coserve profile --json`. ``architectures`` has a row for each kind in its chosen precision.

    ``forms``: every measured kind and precision, whether any expert runs so, and how many experts were compared with
    fp32 and proven. ``experts``: form of each expert on each processor, with the reason. An architecture of which the
    line has several kinds (input sizes, stems) is named by its kind.
    """
    several = defaultdict(set)
    for kind in profile.chosen_kinds:
        several[kind.architecture].add(kind.kind)
    architectures: dict[str, dict[str, Any]] = {}
    for kind in profile.chosen_kinds:
        name = kind.architecture if len(several[kind.architecture]) == 1 else kind.kind
        architectures.setdefault(name, {})[kind.processor] = _kind_json(kind)
    allocation, on_the_line = profile.allocation, profile.kinds_run
    return {
        "device": {
            "name": profile.box.device,
            "model": profile.box.model,
            "processors": list(profile.box.processors),
            "cores": profile.box.cores,
            "versions": dict(profile.box.versions),
            "links_bytes_per_s": profile.link_bytes_per_s,
            "speedups": {name: list(values) for name, values in profile.speedups.items()},
        },
        "architectures": architectures,
        "forms": [_form_json(kind, profile) for kind in profile.kinds if kind.kind in on_the_line],
        "experts": {
            f"{each.expert} on {each.processor}": {"precision": each.precision, "why": each.why}
            for each in profile.forms.values()
        },
        "decodings": {
            each.expert: asdict(each) | {"agrees": each.agrees, "image_s": each.image_s} for each in profile.decodings
        },
        "usage": dict(profile.usage.probabilities),
        "usage_origin": profile.usage.origin,
        "pass_rates": dict(profile.usage.pass_rates),
        "allocation": {
            "origin": allocation.origin,
            "budget_bytes": dict(allocation.budget_bytes),
            "pools": {
                pool.pool: {name: size for name, size in asdict(pool).items() if name != "pool"}
                for pool in allocation.pools
            },
        },
        "executors": dict(allocation.executors),
    }


def profile_table(profile: StoredProfile) -> str:
    box = profile.box
    versions = ", ".join(f"{name} {version}" for name, version in sorted(box.versions.items()))
    heading = f"{box.device}: {box.model}, {box.cores} cores; {versions}"
    text = folded((heading, folded_table(COLUMNS, _kind_rows(profile)), *_closing_lines(profile)))
    return "\n".join(line.rstrip() for line in text.splitlines())


def profile_charts(profile: StoredProfile, folder: Path) -> list[Path]:
    """Figures 5, 6 and 12 of the paper for this box, its usage CDF (11) and what the searches tried (17, 18)."""
    folder.mkdir(parents=True, exist_ok=True)
    return [*_kind_charts(profile, folder), *_usage_chart(profile, folder), *_search_charts(profile, folder)]


def _kind_charts(profile: StoredProfile, folder: Path) -> list[Path]:
    of_images = [kind for kind in profile.chosen_kinds if not kind.lease_bytes]
    shown = sorted(of_images, key=lambda kind: (-kind.weight_bytes, kind.kind))[:MOST_CURVES]
    if not shown:
        return []
    images, note = "images in a batch", f"{profile.box.model}; means over repeats, outliers drawn in"
    averages = [Series(_label(kind), *_points(kind, per_image=True)) for kind in shown]
    held = [
        Series(
            _label(kind),
            [batch.batch_size for batch in kind.batches],
            [(kind.weight_bytes + batch.workspace_bytes) / MEBIBYTE for batch in kind.batches],
        )
        for kind in shown
    ]
    average, whole, memory = (folder / f"{name}.png" for name in ("average-latency", "batch-latency", "footprint"))
    line_chart(average, Labels("Average latency against batch size", "ms per image", images, note), averages)
    line_chart(
        whole, Labels("Latency against batch size, with K n + B", "ms", images, f"{note}; dashed: fit"), _fitted(shown)
    )
    line_chart(memory, Labels("Memory of one expert and its batch", "MiB", images, "weights + workspace"), held)
    return [average, whole, memory]


def _form_json(kind: KindProfile, profile: StoredProfile) -> dict[str, Any]:
    compared = [each for each in profile.agreements_of(kind) if each.images]
    return {
        "kind": kind.kind,
        "processor": kind.processor,
        **_kind_json(kind),
        "is_chosen": kind in profile.chosen_kinds,
        "agrees": all(each.agrees for each in compared) if compared else None,
        "compared": len(compared),
        "proven": sum(each.proves for each in compared),
    }


def _kind_json(kind: KindProfile) -> dict[str, Any]:
    return {name: getattr(kind, name) for name in KIND_KEYS} | {
        "workspace_bytes": [batch.workspace_bytes for batch in kind.batches],
        "batch_sizes": [batch.batch_size for batch in kind.batches],
        "workspace_per_image_bytes": kind.workspace_bytes,
        "load_s": {"ssd": None, "host": None} | dict(kind.load_s),
    }


def _kind_rows(profile: StoredProfile) -> Iterator[tuple[str, ...]]:
    on_the_line, chosen = profile.kinds_run, profile.chosen_kinds
    short = {kind: " ".join(part for part in kind.split() if part not in NORMALIZATIONS) for kind in on_the_line}
    times = Counter(short.values())
    names = {kind: name if times[name] == 1 else kind for kind, name in short.items()}
    for kind in (each for each in profile.kinds if each.kind in on_the_line):
        yield (
            ("* " if kind in chosen else "  ") + names[kind.kind],
            kind.processor,
            kind.precision,
            f"{kind.K_s * 1e3:.2f}",
            f"{kind.B_s * 1e3:.2f}",
            f"{kind.fit_error:.1%}",
            str(kind.max_batch),
            mib(kind.weight_bytes, MIB),
            mib(kind.workspace_bytes, MIB),
            f"{kind.load_s['ssd'] * 1e3:.1f}" if "ssd" in kind.load_s else "-",
            _agreement(profile.agreements_of(kind)),
        )


def _agreement(compared: Sequence[Agreement]) -> str:
    if not compared:
        return ""
    differing, proven = sum(not each.agrees for each in compared), sum(each.proves for each in compared)
    if differing:
        return f"NO: {differing} of {len(compared)} experts"
    return f"yes, {proven} of {len(compared)} experts" if proven else "not proven"


def _expert_lines(profile: StoredProfile) -> Iterator[str]:
    by_reason: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in profile.forms.values():
        by_reason[each.processor, each.precision, each.why].append(each.expert)
    for (processor, form, why), experts in sorted(by_reason.items()):
        more = len(experts) - NAMED_EXPERTS
        named = ", ".join(experts[:NAMED_EXPERTS]) + (f" and {more} more" if more > 0 else "")
        yield f"form         {named} in {form} on {processor}: {why}"


def _closing_lines(profile: StoredProfile) -> Iterable[str]:
    yield "* = what the agent will run; a batch of n takes K n + B; fit = largest distance of a size's mean from that"
    yield from _expert_lines(profile)
    samples = sorted({kind.samples for kind in profile.chosen_kinds})
    yield f"measured on  {'; '.join(samples)}"
    yield "links        " + ", ".join(f"{link.link} {link.bytes_per_s / 1e6:,.0f} MB/s" for link in profile.links)
    for processor, speedups in profile.speedups.items():
        factors = ", ".join(f"{number} x{speedup:.2f}" for number, speedup in enumerate(speedups, start=1))
        yield f"together     {processor} executors against one: {factors}"
    for processor, gain in profile.graphs.items():
        yield f"graphs       small batches on {processor} without CUDA graphs against with them: x{gain:.2f}"
    if profile.decodings:
        yield _decoding_line(profile.decodings)
    for kind in (each for each in profile.chosen_kinds if each.lease_bytes):
        yield (
            f"texts        {kind.kind} in {kind.precision} on {kind.processor}: {kind.K_prompt_s * 1e3:.3f} ms for "
            f"a token that is read, {kind.K_output_s * 1e3:.3f} for one that is written, {kind.lease_bytes} bytes of "
            "keys and values"
        )
    cdf = usage_cdf(profile.usage.probabilities)
    half = next((number for number, share in enumerate(cdf, start=1) if share >= 0.5), len(cdf))
    requests = f", {profile.usage.requests} requests" if profile.usage.requests else ""
    yield f"usage        {profile.usage.origin}{requests}: {half} of {len(cdf)} experts take half of all uses"
    allocation = profile.allocation
    executors = ", ".join(f"{count} {processor}" for processor, count in allocation.executors.items() if count)
    yield f"executors    {executors} ({allocation.origin})"
    for pool in allocation.pools:
        yield (
            f"memory       {pool.pool}: {mib(pool.expert_bytes, MIB)} for the {pool.experts} most used experts, "
            f"{mib(pool.workspace_bytes, MIB)} for batches"
        )
    for search, trials in _by_search(profile.trials).items():
        rates = ", ".join(f"{trial.setting} {trial.images_per_s:.1f}" for trial in trials[:MOST_TRIALS])
        yield f"tried        {search}, images/s: {rates}"


def _decoding_line(decodings: Sequence[ImageDecoding]) -> str:
    images = sum(each.images for each in decodings)
    image_s, megapixels = sum(each.full_s for each in decodings) / images, sum(each.megapixels for each in decodings)
    scaled = [each for each in decodings if each.agrees]
    text = f"decoding     {image_s * 1e3:.1f} ms for an image of {megapixels / images:.2f} megapixels on one core"
    if not scaled:
        return f"{text}; no JPEG is decoded to fewer pixels"
    scaled_s = sum(each.scaled_s for each in scaled) / sum(each.images for each in scaled)
    return f"{text}; {scaled_s * 1e3:.1f} for {len(scaled)} of {len(decodings)} experts with smaller JPEGs"


def _label(kind: KindProfile) -> str:
    return f"{kind.architecture} {kind.kind.split()[1]} {kind.precision} on {kind.processor}"


def _points(kind: KindProfile, *, per_image: bool) -> tuple[list[float], list[float]]:
    sizes = [float(batch.batch_size) for batch in kind.batches]
    times = [typical_s(batch.seconds) * 1e3 for batch in kind.batches]
    return sizes, [each / size for each, size in zip(times, sizes, strict=True)] if per_image else times


def _fitted(kinds: Sequence[KindProfile]) -> list[Series]:
    measured = [
        Series(_label(kind), *_points(kind, per_image=False), kind="points", colour=number)
        for number, kind in enumerate(kinds)
    ]
    lines = [
        Series(
            f"{kind.K_s * 1e3:.2f} n + {kind.B_s * 1e3:.2f}",
            [1.0, float(kind.max_batch)],
            [(kind.K_s + kind.B_s) * 1e3, (kind.K_s * kind.max_batch + kind.B_s) * 1e3],
            kind="dashed",
            colour=number,
        )
        for number, kind in enumerate(kinds)
    ]
    return measured + lines


def usage_cdf(probabilities: Mapping[str, float]) -> tuple[float, ...]:
    """Share of all uses of the 1, 2, 3... most used experts together (section 4.4, Figure 11).

    Probabilities need not add up to 1, shares do. Without any use all experts share alike.
    """
    descending = sorted(probabilities.values(), reverse=True)
    total = sum(descending)
    if total <= 0:
        return tuple((number + 1) / len(descending) for number in range(len(descending)))
    return tuple(min(share / total, 1.0) for share in accumulate(descending))


def _usage_chart(profile: StoredProfile, folder: Path) -> list[Path]:
    cdf = usage_cdf(profile.usage.probabilities)
    if not cdf:
        return []
    path, note = folder / "usage.png", f"{profile.usage.origin}"
    counts = [float(number) for number in range(len(cdf) + 1)]
    actual = Series("this line", counts, [0.0, *cdf])
    even = Series("all experts alike", [0.0, float(len(cdf))], [0.0, 1.0], kind="dashed")
    line_chart(path, Labels("Expert usage", "share of all uses", "experts, the most used first", note), [actual, even])
    return [path]


def _search_charts(profile: StoredProfile, folder: Path) -> list[Path]:
    drawn = []
    for search, trials in _by_search(profile.trials).items():
        if not search.startswith("memory:") or len(trials) < 2:
            continue
        path = folder / f"{search.replace(':', '-')}.png"
        points = sorted({(float(trial.setting.split()[0]), trial.images_per_s) for trial in trials})
        series = [Series("images/s", [count for count, _ in points], [speed for _, speed in points])]
        note = f"{profile.allocation.origin}; the decay window of section 4.4"
        line_chart(path, Labels(f"Throughput against experts in memory, {search}", "images/s", "experts", note), series)
        drawn.append(path)
    return drawn


def _by_search(trials: Iterable[SearchTrial]) -> dict[str, list[SearchTrial]]:
    found: defaultdict[str, list[SearchTrial]] = defaultdict(list)
    for trial in trials:
        found[trial.search].append(trial)
    return dict(found)
