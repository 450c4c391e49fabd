"""Plan of a line before deployment: each policy in each memory, with bounds that no policy can beat.

Guarantees: planning uses the serving Engine; all rows of a plan have the same requests, which run the same experts;
equal inputs give equal rows. Planning loads and writes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.core.request import IMAGE
from experts.errors import ConfigError
from experts.sizes import size_text
from profiler.planning.advice import decoding_times
from profiler.planning.limits import PlannedCase, with_gains
from profiler.planning.workers import plan_workers
from profiler.simulation.bounds import bounds, unread_bytes
from profiler.simulation.forecast import forecast, quantile_s, reaches, scenario_of
from profiler.tables import folded, folded_table, wait_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import JustifyMethod
    from rich.table import Table

    from agent.config import LineConfig
    from agent.core.engine import EngineSetup
    from agent.device_profile.records import StoredProfile
    from profiler.planning.advice import Advice
    from profiler.planning.workers import WorkersPlan
    from profiler.simulation.bounds import Bounds
    from profiler.simulation.forecast import Scenario
    from profiler.workload.traces import TracedArrival

SHIFT_S = 8 * 3600.0
WORKSPACE = "_workspace"
LEASES = "_leases"
LOAD_PATHS = ("ssd_host", "host_device", "ssd_device")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Forecast of one policy in one memory. Waits are from arrival to outcome, of images where there are any.

    ``memory``: bytes of weights, workspaces and leases of texts, by pool. ``switching_loads``: into memories that
    experts run from. ``bytes_read_per_shift``: in eight hours at the takt's rate, or at ``images_per_s`` where the takt
    is missed or there are no boards (``required_images_per_s`` and ``takt_met`` None). ``takt_met``: no queue grows
    while the trace, texts included, repeats at the takt's rate. ``images_per_s`` counts texts, too; waits of ``texts``
    are to their last token. ``bound``: bound of the offline optimum, with the right experts in memory at the start.
    ``roofline_images_per_s``: the same floor with this row's start, and with the cores' limit.
    ``decoding_images_per_s``: all cores only decoding; ``cores_images_per_s``: the cores' limit, decoding and
    computing; None where decoding was not measured.
    """

    policy: str
    memory: Mapping[str, int]
    executors: Mapping[str, int]
    requests: int
    seconds: float
    images_per_s: float
    switches: int
    loads: Mapping[str, int]
    switching_loads: int
    evictions: int
    bytes_read: int
    bytes_read_per_shift: int
    p50_wait_s: float
    p99_wait_s: float
    required_images_per_s: float | None
    takt_met: bool | None
    bound: Bounds
    roofline_images_per_s: float
    texts: int = 0
    written_tokens_per_s: float = 0.0
    text_p50_s: float | None = None
    text_p99_s: float | None = None
    decoding_images_per_s: float | None = None
    cores_images_per_s: float | None = None

    @property
    def roofline_fraction(self) -> float:
        return self.images_per_s / self.roofline_images_per_s if self.roofline_images_per_s > 0.0 else 0.0


class LinePlan:
    """A line on the box that was profiled, for one trace. Raises ConfigError for a line that cannot run or fit.

    ``ssd_bytes_per_s``: instead of the measured speed. ``seed`` draws which requests a step lets pass.
    """

    def __init__(
        self,
        config: LineConfig,
        profile: StoredProfile,
        trace: Sequence[TracedArrival],
        ssd_bytes_per_s: float | None = None,
        seed: int = 0,
    ) -> None:
        if ssd_bytes_per_s is not None and ssd_bytes_per_s <= 0.0:
            raise ConfigError(f"an SSD of {ssd_bytes_per_s} bytes/s reads nothing - give more than 0")
        scenario = scenario_of(config.catalog.graph, profile, trace, seed)
        decoding = decoding_times(profile, scenario)
        self._case = PlannedCase(config, profile, scenario, decoding, required_images_per_s(config), ssd_bytes_per_s)

    def row(self, policy: str | None = None, memory: Mapping[str, int] | None = None) -> PlanRow:
        """``memory``: bytes by host, device and workspace. None: the line's own policy or memory."""
        case = self._case_of(policy, memory)
        scenario, setup = case.planned()
        row = plan_row(scenario, setup, case.required_images_per_s)
        if case.decoding is None:
            return row
        time = case.decoding.time(scenario, setup)
        return replace(
            row,
            decoding_images_per_s=(row.requests - row.texts) * time.cores / time.decoding_s,
            cores_images_per_s=time.images_per_s,
            roofline_images_per_s=min(row.roofline_images_per_s, time.images_per_s),
        )

    def advice(self, policy: str | None = None, memory: Mapping[str, int] | None = None) -> Advice:
        """Limit of the line, with remedies and gains; arguments as of ``row``."""
        case = self._case_of(policy, memory)
        scenario, setup = case.planned()
        _refuse_broken(scenario, setup)
        load = None if case.decoding is None else case.decoding.load(scenario, setup)
        return with_gains(case.advice().with_decoding(load), case)

    def workers(self, most: int, policy: str | None = None, memory: Mapping[str, int] | None = None) -> WorkersPlan:
        """The line on 1, 2, ... ``most`` workers; the other arguments as of ``row``."""
        case = self._case_of(policy, memory)
        scenario, setup = case.planned()
        _refuse_broken(scenario, setup)
        return plan_workers(scenario, setup, most)

    def _case_of(self, policy: str | None, memory: Mapping[str, int] | None) -> PlannedCase:
        return replace(self._case, config=self._case.config.having(policy=policy, memory=memory))


def plan_row(scenario: Scenario, setup: EngineSetup, required_images_per_s: float | None) -> PlanRow:
    """Raises ConfigError as ``forecast`` does, and for broken experts."""
    _refuse_broken(scenario, setup)
    played = forecast(scenario, setup)
    resources = scenario.resources(setup)
    bound = bounds(scenario.requests, resources)
    io_s = unread_bytes(scenario.experts, resources, played.resident_at_start) / scenario.ssd_bytes_per_s
    roofline_s = max(bound.compute_s, bound.arrivals_s, io_s)
    requests = len(scenario.trace)
    images_s = [wait for wait, each in zip(played.waits_s, scenario.trace, strict=True) if each.work is IMAGE]
    texts_s = [wait for wait, each in zip(played.waits_s, scenario.trace, strict=True) if each.work is not IMAGE]
    required_per_s = None if required_images_per_s is None or not images_s else required_images_per_s
    rate_per_s = None if required_per_s is None else scenario.with_texts(required_per_s)
    is_met = None if rate_per_s is None else reaches(scenario, setup, played, rate_per_s)
    shift_images_per_s = rate_per_s if rate_per_s is not None and is_met else played.images_per_s
    return PlanRow(
        policy=setup.policy,
        memory={pool.name: pool.expert_bytes for pool in setup.pools}
        | {pool.name + WORKSPACE: pool.workspace_bytes for pool in setup.pools}
        | {pool.name + LEASES: pool.lease_bytes for pool in setup.pools if pool.lease_bytes},
        executors=dict(Counter(spec.processor for spec in setup.executors)),
        requests=requests,
        seconds=played.seconds,
        images_per_s=played.images_per_s,
        switches=played.switches,
        loads=dict.fromkeys(LOAD_PATHS, 0) | dict(played.loads),
        switching_loads=played.loads_to({spec.pool for spec in setup.executors}),
        evictions=played.evictions,
        bytes_read=played.bytes_read,
        bytes_read_per_shift=round(played.bytes_read / len(played.waits_s) * shift_images_per_s * SHIFT_S),
        p50_wait_s=quantile_s(images_s or texts_s, 0.5),
        p99_wait_s=quantile_s(images_s or texts_s, 0.99),
        required_images_per_s=required_per_s,
        takt_met=is_met,
        bound=bound,
        roofline_images_per_s=requests / roofline_s if roofline_s > 0.0 else 0.0,
        texts=len(texts_s),
        written_tokens_per_s=sum(each.work.output for each in scenario.trace) / played.seconds,
        text_p50_s=quantile_s(texts_s, 0.5) if texts_s else None,
        text_p99_s=quantile_s(texts_s, 0.99) if texts_s else None,
    )


def required_images_per_s(config: LineConfig) -> float | None:
    """Demand of the line's boards: board types take turns, each followed by the next one takt later."""
    if not config.boards:
        return None
    images = sum(sum(board.quantities.values()) for board in config.boards.values())
    return images / sum(board.takt_s for board in config.boards.values())


def as_json(rows: Sequence[PlanRow], advice: Advice | None = None) -> dict[str, Any]:
    advised = None if advice is None else asdict(advice) | {"sentences": list(advice.sentences)}
    if advised is not None and advice is not None and advice.decoding is not None:
        advised["decoding"] |= advice.decoding.figures()
    found = [
        asdict(row)
        | {"bound": asdict(row.bound) | {"seconds": row.bound.seconds}, "roofline_fraction": row.roofline_fraction}
        for row in rows
    ]
    return {"rows": found, "advice": advised}


def plan_table(rows: Sequence[PlanRow], advice: Advice | None = None) -> str:
    texts = (_table(rows, COLUMNS_OF_TEXTS), LEGEND_OF_TEXTS) if any(row.texts for row in rows) else ()
    decoding = _decoding(rows)
    return folded((_table(rows, COLUMNS), LEGEND, *texts, *decoding, *(() if advice is None else advice.sentences)))


def _decoding(rows: Sequence[PlanRow]) -> tuple[str, ...]:
    rates = {
        (row.decoding_images_per_s, row.cores_images_per_s)
        for row in rows
        if row.decoding_images_per_s is not None and row.cores_images_per_s is not None
    }
    return tuple(
        f"decoding: {alone:.1f} images/s if all cores did nothing else; {both:.1f} at most beside the executors' work."
        for alone, both in sorted(rates)
    )


def _table(rows: Sequence[PlanRow], shown: Mapping[str, Callable[[PlanRow], str]]) -> Table:
    columns: dict[str, JustifyMethod] = {"policy": "left", **dict.fromkeys(shown, "right")}
    return folded_table(columns, ((row.policy, *(text(row) for text in shown.values())) for row in rows))


def _refuse_broken(scenario: Scenario, setup: EngineSetup) -> None:
    needed = sorted(scenario.experts & setup.broken.keys())
    if needed:
        reasons = [f"the trace needs {expert}, which cannot be served: {setup.broken[expert]}" for expert in needed]
        raise ConfigError.of([ConfigError(reason) for reason in reasons])


def _budgets(row: PlanRow) -> str:
    pools = [name for name in row.memory if not name.endswith((WORKSPACE, LEASES))]
    parts = {name: (name, name + WORKSPACE, name + LEASES) for name in pools}
    return " + ".join(size_text(sum(row.memory.get(part, 0) for part in parts[name])) for name in pools)


def _bytes_text(size_bytes: float) -> str:
    return f"{size_bytes / 1e12:.1f} TB" if size_bytes >= 1e12 else f"{size_bytes / 1e9:.1f} GB"


COLUMNS: dict[str, Callable[[PlanRow], str]] = {
    "memory": _budgets,
    "images/s": lambda row: f"{row.images_per_s:.2f}",
    "of floor": lambda row: f"{row.roofline_fraction:.0%}",
    "switches": lambda row: str(row.switches),
    "loads": lambda row: str(row.switching_loads),
    "least": lambda row: str(row.bound.switches),
    "in order": lambda row: str(row.bound.fcfs_switches),
    "wait p50": lambda row: wait_text(row.p50_wait_s),
    "p99": lambda row: wait_text(row.p99_wait_s),
    "read a shift": lambda row: _bytes_text(row.bytes_read_per_shift),
    "takt": lambda row: "-" if row.takt_met is None else "met" if row.takt_met else "missed",
}
COLUMNS_OF_TEXTS: dict[str, Callable[[PlanRow], str]] = {
    "memory": _budgets,
    "texts": lambda row: str(row.texts),
    "tokens/s": lambda row: f"{row.written_tokens_per_s:.1f}",
    "text p50": lambda row: "-" if row.text_p50_s is None else wait_text(row.text_p50_s),
    "text p99": lambda row: "-" if row.text_p99_s is None else wait_text(row.text_p99_s),
}
LEGEND_OF_TEXTS = (
    "texts: images/s counts them, too. tokens/s: written tokens. text p50, p99: from arrival to the last token."
)
LEGEND = (
    "of floor: images/s over the most that work, decoding, bytes and arrivals allow. switches: loads that a request "
    "waited for. loads: all loads, after the start, into memories that experts run from. least: loads that no schedule "
    "can avoid; in order: the same for requests in order of arrival. read a shift: in eight hours at the takt, or "
    "at images/s where it is missed. takt: met if no queue grows while the trace repeats at the takt's rate."
)
