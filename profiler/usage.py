"""Usage probabilities of experts: computed, counted or learned (CoServe, section 4.5).

Usage is computed from routes and quantities, counted by running the routes on samples, or learned from history:
results.db, or the output of `coserve results`. This module writes nothing, and an agent may run on the line meanwhile.
Guarantees: probabilities of experts that are first on their routes add up to 1, unless one is later on another route;
notes name everything that a count skipped; an expert without a request is unlikely, never impossible. Smoothing:
    pass rates    each expert has one further request, which passed at the rate of all experts together;
                  all experts together have one further request, which passed by half
    served        one further request, spread evenly over the routes, and passing at those rates
"""

from __future__ import annotations

import csv
import json
import sqlite3
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from agent.deployment.build import AgentOptions, agent_with_requests
from agent.device_profile.records import UsageOrigin, UsageProfile
from agent.line_file.usage import component_shares, usage_probabilities
from agent.records.result_reader import ResultReader
from agent.runtime.images.sources import ImageFile
from experts.errors import ConfigError, FilePlace
from experts.expert import Verdict
from profiler.workload.samples import LineSamples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.core.request import Outcome
    from agent.device_profile.records import StoredProfile
    from experts.graph import ExpertGraph
    from profiler.workload.samples import Sample

FEW_REQUESTS = 200  # with fewer a note warns: chance alone moves a tenth of them by two hundredths
MOST_SAMPLES = 1000  # of each expert, in the folder's own mix of good and bad parts
NAMED = 3  # experts that a note names
SQLITE_MAGIC = b"SQLite format 3\0"
LARGEST_FIELD_BYTES = 2**24  # of CSV: `detail` holds every box of an image


@dataclass(frozen=True, slots=True)
class UsageFound:
    """Usage probabilities with caveats, a sentence each."""

    usage: UsageProfile
    notes: tuple[str, ...] = ()


def computed_usage(config: LineConfig, pass_rates: Mapping[str, float] | None = None) -> UsageProfile:
    """Usage by routes and board quantities; an expert without a pass rate lets every request pass (section 4.5)."""
    rates = dict(pass_rates or {})
    return UsageProfile(usage_probabilities(config.catalog, config.boards, rates), rates, UsageOrigin.COMPUTED)


def usage_from_results(path: Path, config: LineConfig) -> UsageFound:
    """Usage learned from this line's results.db, also beside a running agent, or from the output of `coserve results`.

    Rows of other lines, without an expert (broken images) or with unknown experts are left out and counted in notes.
    Raises ConfigError where the file is no history, or holds nothing of this line.
    """
    count = RouteCount()
    lines: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    strangers: Counter[str] = Counter()
    for request in served_requests(path):
        lines[request.line] += 1
        if request.line != config.line:
            continue
        unknown = [name for name in request.experts if name not in config.catalog.experts]
        if unknown:
            strangers.update(unknown)
            left_out["unknown"] += 1
        elif not request.experts:
            left_out["empty"] += 1
        else:
            count.add(request.experts, request.verdict)
    if not count.requests:
        problem = (
            f"none of its {lines[config.line]} rows of line {config.line!r} names an expert of it - name newer results"
        )
        if config.line not in lines:
            problem = f"no row of line {config.line!r}, only of {_most(lines)} - name the results of this line"
        if not lines:
            problem = "holds no result yet - let the line serve first"
        raise ConfigError(f"{path}: {problem}")
    notes = [f"rows of other lines: {total} of {name}" for name, total in lines.items() if name != config.line]
    if left_out["unknown"]:
        notes.append(f"{left_out['unknown']} rows name experts that this line does not have: {_most(strangers)}")
    if left_out["empty"]:
        notes.append(f"{left_out['empty']} rows have no expert: their images could not be judged")
    rates = count.pass_rates(config.catalog.experts)
    usage = UsageProfile(count.probabilities(config.catalog.graph, rates), rates, UsageOrigin.SERVED, count.requests)
    return UsageFound(usage, (*notes, *_few(count.requests)))


def usage_from_samples(
    config: LineConfig,
    folder: Path | None,
    progress: Callable[[str, int, int], None],
    most: int = MOST_SAMPLES,
    profile: StoredProfile | None = None,
) -> UsageFound:
    """Usage counted by running each component's route on its sample images, on this box's real engine.

    Components have the boards' quantities, not those among the samples. Passes are counted, so defects should be
    as rare among the samples as on the line. At most ``most`` samples of each expert are run. ``folder``: as in
    ``LineSamples.find``. Without ``profile`` the agent probes, as the line's own profile may be outdated.
    Raises ConfigError where no image can be judged, AgentCrashed.
    """
    samples = LineSamples.find(config, folder, most, is_label_even=False)
    refuse_uncountable(config, samples)
    chosen = {(each.component, each.path): each for listed in samples.by_expert.values() for each in listed}
    requests = [chosen[place] for place in sorted(chosen)]
    outcomes = _outcomes(config, requests, progress, profile)
    judged = _judged([sample.component for sample in requests], outcomes)
    weights = _weights(config, Counter(component for component, _ in judged))
    count = RouteCount()
    for component, outcome in judged:
        count.add([step.expert for step in outcome.steps], outcome.verdict, weights[component])
    rates = count.pass_rates(config.catalog.experts)
    usage = UsageProfile(
        usage_probabilities(config.catalog, config.boards, rates), rates, UsageOrigin.COUNTED, count.requests
    )
    return UsageFound(usage, tuple(_sample_notes(config, samples, len(requests), count)))


def refuse_uncountable(config: LineConfig, samples: LineSamples) -> None:
    """Raises ConfigError for a line without sample images, on which usage could be counted."""
    if samples.by_expert:
        return
    broken = samples.broken
    found = f"only {len(broken)} that cannot be decoded ({broken[0]})" if broken else "no sample image yet"
    raise ConfigError(f"line {config.line} has {found} - let it serve first, or name a sample folder")


@dataclass(slots=True)
class RouteCount:
    """Counts of the experts' uses and passes."""

    requests: int = 0
    _weight: float = 0.0
    _uses: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _reached: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _passed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, experts: Sequence[str], verdict: Verdict, weight: float = 1.0) -> None:
        """Count a request: experts before the last let it pass, and the last one if the verdict is OK.

        A verdict UNKNOWN is no evidence on the last expert.
        """
        self.requests += 1
        self._weight += weight
        for place, expert in enumerate(experts, start=1):
            self._uses[expert] += weight
            is_last = place == len(experts)
            if is_last and verdict is Verdict.UNKNOWN:
                continue
            self._reached[expert] += weight
            if not is_last or verdict is Verdict.OK:
                self._passed[expert] += weight

    def pass_rates(self, experts: Mapping[str, object]) -> dict[str, float]:
        together = (sum(self._passed.values()) + 0.5) / (sum(self._reached.values()) + 1)
        return {name: (self._passed[name] + together) / (self._reached[name] + 1) for name in experts}

    def probabilities(self, graph: ExpertGraph, pass_rates: Mapping[str, float]) -> dict[str, float]:
        one_more = graph.usage({route: 1 / len(graph.routes) for route in graph.routes}, pass_rates)
        return {
            name: (self._uses[name] + one_more.get(name, 0.0)) / (self._weight + 1) for name in sorted(graph.experts)
        }


def _outcomes(
    config: LineConfig,
    requests: Sequence[Sample],
    progress: Callable[[str, int, int], None],
    profile: StoredProfile | None,
) -> list[Outcome]:
    with agent_with_requests(config, progress, AgentOptions(profile=profile)) as (agent, asked):
        agent.start()
        for sample in requests:
            asked.submit(ImageFile(sample.path, sample.max_pixels), component=sample.component)
        return [each.outcome for each in asked.collect(partial(progress, "usage"))]


def _judged(components: Sequence[str], outcomes: Sequence[Outcome]) -> list[tuple[str, Outcome]]:
    pairs = zip(components, outcomes, strict=True)
    judged = [(component, outcome) for component, outcome in pairs if outcome.verdict is not Verdict.UNKNOWN]
    if not judged:
        reasons = Counter(str(outcome.reason) for outcome in outcomes)
        raise ConfigError(
            f"none of {len(outcomes)} sample images could be judged: {_most(reasons)} - give images of this line"
        )
    return judged


def _sample_notes(config: LineConfig, samples: LineSamples, images: int, count: RouteCount) -> Iterator[str]:
    if samples.broken:
        yield f"{len(samples.broken)} files are broken and were left out: {samples.broken[0]}"
    if count.requests < images:
        yield f"{images - count.requests} of {images} images could not be judged and were left out"
    sampled = {each.component for listed in samples.by_expert.values() for each in listed}
    without = sorted(component_shares(config.catalog, config.boards).keys() - sampled)
    if without:
        named = ", ".join(without[:NAMED]) + (", ..." if len(without) > NAMED else "")
        yield f"no sample of {len(without)} components, whose experts pass at the rate of all together: {named}"
    yield from _few(count.requests)


def _weights(config: LineConfig, counted: Counter[str]) -> dict[str, float]:
    """Weight of one image by component, so that components count as on the boards; 1 on average."""
    shares = component_shares(config.catalog, config.boards)
    total = sum(shares.get(component, 0.0) for component in counted)
    if total <= 0:
        return dict.fromkeys(counted, 1.0)
    return {
        component: shares.get(component, 0.0) / total * counted.total() / images
        for component, images in counted.items()
    }


def _few(requests: int) -> tuple[str, ...]:
    if requests >= FEW_REQUESTS:
        return ()
    return (f"only {requests} requests were counted: rough until there are {FEW_REQUESTS}",)


def _most(counted: Counter[str]) -> str:
    named = ", ".join(f"{name} ({times})" for name, times in counted.most_common(NAMED))
    return named + (", ..." if len(counted) > NAMED else "")


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Served request of a line: experts in their order, and verdict."""

    line: str
    experts: tuple[str, ...]
    verdict: Verdict


def served_requests(path: Path) -> Iterator[ServedRequest]:
    """Every request of a results database, or of a JSONL or CSV file that `coserve results` printed.

    Raises ConfigError: see the module.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        hint = "name a results.db, or a file that `coserve results` printed"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}) - {hint}") from error
    if head == SQLITE_MAGIC:
        yield from _from_database(path)
    else:
        yield from _from_text(path)


def _from_database(path: Path) -> Iterator[ServedRequest]:
    try:
        for row in ResultReader(path).query():
            yield ServedRequest(row.line, row.experts, row.verdict)
    except (sqlite3.DatabaseError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a results database of this version ({error}) - name the results.db of a line's state folder"
        ) from error


def _from_text(path: Path) -> Iterator[ServedRequest]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            rows = _json_rows(path, file) if is_json else _csv_rows(path, file)
            for number, row in rows:
                yield _request(row, path, number)
    except UnicodeDecodeError as error:
        raise _no_history(path, "neither a database nor text") from error


def _json_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON ({error}) - remove this line", FilePlace(path, number, 1, "syntax")) from error
        if not isinstance(row, dict):
            raise ConfigError("not a JSON object - remove this line", FilePlace(path, number, 1, "syntax"))
        yield number, row


def _csv_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    before = csv.field_size_limit(LARGEST_FIELD_BYTES)
    try:
        reader = csv.DictReader(file)
        missing = [key for key in ("line", "experts", "verdict") if key not in (reader.fieldnames or ())]
        if missing:
            raise _no_history(path, f"no column {', '.join(missing)}")
        for row in reader:
            with suppress(ValueError):  # other text is refused with the row
                row["experts"] = json.loads(row["experts"] or "")
            row["line"] = (row["line"] or "").removeprefix("'")  # see agent/records/export.py
            yield reader.line_num, row
    except csv.Error as error:
        raise _no_history(path, f"not CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


def _request(row: Mapping[str, Any], path: Path, number: int) -> ServedRequest:
    for key in ("line", "experts", "verdict"):
        if row.get(key) is None:
            raise ConfigError(
                "is missing - name a file that `coserve results` printed", FilePlace(path, number, 1, key)
            )
    experts, verdict = row["experts"], row["verdict"]
    if not isinstance(experts, list) or not all(isinstance(name, str) for name in experts):
        raise ConfigError(f"{experts!r} is no list of experts - correct it", FilePlace(path, number, 1, "experts"))
    if len(set(experts)) < len(experts):
        raise ConfigError(f"{experts!r} names an expert twice - correct it", FilePlace(path, number, 1, "experts"))
    if verdict not in list(Verdict):
        raise ConfigError(
            f"{verdict!r} is not {', '.join(Verdict)} - correct it", FilePlace(path, number, 1, "verdict")
        )
    return ServedRequest(str(row["line"]), tuple(experts), Verdict(verdict))


def _no_history(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why} - name a results.db, or a file that `coserve results` printed")
