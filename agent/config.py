"""A line file (YAML) and the environment -> one frozen, typed configuration. The only reader of the environment.

Precedence: environment > file > default: `COSERVE__SCHEDULING__MAX_OVERTAKE_S=2` is `scheduling: {max_overtake_s: 2}`.
All mistakes are reported at once, each with file, line and key or with the variable's name; nothing starts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from pydantic import BaseModel, Field, StrictBool

from agent.line_file.api import ApiSection
from agent.line_file.boards import BoardSection, LayoutSections
from agent.line_file.cluster import ClusterSection
from agent.line_file.intake import TYPE_GROUP, IntakeSection
from agent.line_file.machine import (
    Device,
    ExecutorCounts,
    MemorySection,
    OptionalPrecision,
    PolicyName,
    SchedulingSection,
)
from agent.line_file.promotions import kept_promotions, promoted
from agent.line_file.records import GoldenSection, OutboxSection, RecordsSection
from agent.line_file.texts import TextsSection, text_problems, text_routes_of
from agent.line_file.values import AUTO, Name, shown_url
from experts.backends.forms import FORMS, form_of
from experts.catalog import Catalog, CatalogSections, FilePath, build_catalog, catalog_problems, is_llm
from experts.document import Document, key_text, read_document, suggestion
from experts.errors import ConfigError, SecretMissing
from experts.expert import Precision
from experts.llm.parallel.shape import Meeting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from agent.line_file.cluster import WorkerSection
    from agent.line_file.machine import GivenPrecision
    from agent.line_file.promotions import Promotion
    from agent.line_file.values import SecretSection
    from experts.document import KeyPath
    from experts.expert import Expert

ENVIRONMENT_PREFIX = "COSERVE__"
PACKED = "packed"  # folder of packed weights in the state folder
AUTOMATIC = frozenset(
    {"memory.host", "memory.device", "memory.workspace", "memory.images", "precision", "executors", "texts.kv"}
)  # None: auto
SPINNING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}  # of libgomp, of the others in ms: 1 is the least
SPINNING_VARIABLES = frozenset({"OMP_WAIT_POLICY", *SPINNING})  # the first is OpenMP's own: spin, or do not
CREDENTIALS = "CREDENTIALS_DIRECTORY"  # systemd's folder of LoadCredential=


class LineSections(CatalogSections):
    """A whole line file."""

    line: Name = Field(description="name of this installation: letters, digits, `_`, `.`, `-`")
    state: FilePath = Field(description="folder of databases and packed weights, relative to this file")
    boards: dict[Name, BoardSection] = Field({}, description="board types: quantities give usage and the board verdict")
    memory: MemorySection = Field(MemorySection(), description="memory budgets")
    precision: OptionalPrecision = Field(
        None,
        description="auto (the fastest that agrees with fp32 by the device profile; without one fp32, language models "
        "as they are stored), fp32, bf16, fp16, onnxruntime (fp32 by ONNX Runtime), onednn-fp32, onednn-bf16 or "
        "onednn-int8 (by oneDNN, fused; eight bits for experts that `coserve profile` calibrated), onnxruntime-int8 "
        "(the same by ONNX Runtime), these five on CPU executors, or int8, of language models alone",
    )
    device: Device = Field("auto", description="auto, cpu, cuda, mps, emulated or integrated")
    executors: ExecutorCounts = Field(
        None,
        description="auto (the device profile's; without one a rule) or executors per processor, {cuda: 3, cpu: 1}",
    )
    policy: PolicyName = Field(
        "coserve", description="coserve, paper, samba, samba-fifo, samba-parallel, none, em or em-ra"
    )
    scheduling: SchedulingSection = Field(SchedulingSection(), description="bounds of the scheduler")
    texts: TextsSection = Field(TextsSection(), description="texts for language models: their memory, time and routes")
    intake: IntakeSection = Field(IntakeSection(), description="sources of images")
    api: ApiSection = Field(ApiSection(), description="addresses of the APIs")
    require_proof: StrictBool = Field(
        False, description="true: verdicts of an expert that is not proven on known answers are UNKNOWN"
    )
    golden: GoldenSection | None = Field(None, description="when proven experts are proven again; default never")
    records: RecordsSection = Field(RecordsSection(), description="records that are kept, and for how long")
    outbox: OutboxSection = Field(OutboxSection(), description="receivers of verdicts")
    cluster: ClusterSection = Field(ClusterSection(), description="workers beside the agent")


@dataclass(frozen=True, slots=True)
class LineConfig:
    """One line as configured: the sections of its file, resolved. Sizes in bytes; None: auto. ``layouts``: by board
    type, of those that have one. ``promotions``: in force. ``is_profile_strict``: a device profile of another box is an
    error instead of an alarm."""

    line: str
    state: Path
    catalog: Catalog
    boards: Mapping[str, BoardSection]
    memory: MemorySection
    precision: Precision | None
    device: Device
    executors: Mapping[str, int] | None
    policy: PolicyName
    scheduling: SchedulingSection
    texts: TextsSection
    intake: IntakeSection
    api: ApiSection
    records: RecordsSection
    outbox: OutboxSection
    layouts: Mapping[str, LayoutSections]
    document: Document
    cluster: ClusterSection = field(default_factory=ClusterSection)
    promotions: tuple[Promotion, ...] = ()
    require_proof: bool = False
    golden: GoldenSection | None = None
    is_profile_strict: bool = False

    @property
    def results_file(self) -> Path:
        return self.state / "results.db"

    @property
    def packed_folder(self) -> Path:
        return self.state / PACKED

    @property
    def profile_file(self) -> Path:
        return self.state / "profile.db"

    def precision_beside(self, expert: Expert) -> Precision | None:
        """The file's precision for an expert that sets none; None: auto."""
        return None if expert.is_automatic else self.precision

    def of_worker(self, kind: WorkerSection) -> LineConfig:
        """The line as a worker of this kind has it."""
        own = replace(self, device=kind.device, executors=kind.executors, memory=kind.memory)
        return replace(own, cluster=ClusterSection())

    def having(
        self,
        *,
        policy: str | None = None,
        memory: Mapping[str, int] | None = None,
        executors: Mapping[str, int] | None = None,
        precision: GivenPrecision | None = None,
    ) -> LineConfig:
        """The line with these values instead of the file's; None: the file's. ``memory``: bytes by name.
        ``precision``: as in a line file. Raises ConfigError for an unknown policy or memory."""
        policies = get_args(PolicyName)
        if policy is not None and policy not in policies:
            raise ConfigError(f"no policy {policy!r} - {suggestion(policy, policies)}")
        unknown = sorted((memory or {}).keys() - MemorySection.model_fields.keys())
        if unknown:
            raise ConfigError(f"unknown memory {', '.join(unknown)} - use host, device, workspace or images")
        return replace(
            self,
            policy=self.policy if policy is None else cast("PolicyName", policy),
            memory=self.memory.model_copy(update=dict(memory or {})),
            executors=self.executors if executors is None else executors,
            precision=self.precision if precision is None else None if precision == AUTO else Precision(precision),
        )


def read_line(path: Path, environment: Mapping[str, str] | None = None) -> LineConfig:
    """Read and validate a line file. ``environment``: None for the process's. Raises ConfigError, with ``problems``."""
    return line_of(read_document(path.absolute()), environment)


def line_of(
    document: Document,
    environment: Mapping[str, str] | None = None,
    promotions: Sequence[Promotion] | None = None,
) -> LineConfig:
    """``read_line`` for a document in memory. ``promotions``: None for those in the line's state."""
    document, sections, in_force = _resolved_document(document, environment, promotions)
    problems: list[ConfigError] = []
    layouts: dict[str, LayoutSections] = {}
    for name, board in sections.boards.items():
        if board.layout is not None:
            try:
                layouts[name] = _read_layout(board.layout, board, sections.routes)
            except ConfigError as error:
                problems += error.problems
    problems = [
        *catalog_problems(sections, document),
        *text_problems(sections.texts, sections, document),
        *_precision_problems(sections, document),
        *_board_problems(sections, document),
        *_folder_problems(sections, layouts, document),
        *_camera_problems(sections, document),
        *problems,
    ]
    if problems:
        raise ConfigError.of(problems)
    catalog = build_catalog(sections, document, text_routes_of(sections.texts, sections), sections.state / PACKED)
    taken_over = LineSections.model_fields.keys() & {each.name for each in fields(LineConfig)}
    values: dict[str, Any] = {name: getattr(sections, name) for name in taken_over}
    values["api"] = sections.api.with_local_doors(sections.state)
    return LineConfig(**values, catalog=catalog, layouts=layouts, document=document, promotions=in_force)


def _resolved_document(
    document: Document, environment: Mapping[str, str] | None, promotions: Sequence[Promotion] | None = None
) -> tuple[Document, LineSections, tuple[Promotion, ...]]:
    """The document with variables and promotions in the place of its own values."""
    document = overlay(document, os.environ if environment is None else environment)
    sections = document.validate(LineSections)
    document, in_force = promoted(document, kept_promotions(sections.state) if promotions is None else promotions)
    if in_force:
        sections = document.validate(LineSections)
    return document, sections, in_force


@dataclass(frozen=True, slots=True)
class ResolvedKey:
    """One effective value, without secrets in addresses. ``origin``: FILE:LINE, a variable, or `default`."""

    key: str
    value: object
    origin: str


def resolved_keys(path: Path, environment: Mapping[str, str] | None = None) -> list[ResolvedKey]:
    """Every value of a line file, defaults included, in the order of its sections. Raises ConfigError."""
    document, sections, _ = _resolved_document(read_document(path.absolute()), environment)
    return list(_resolved(sections, document, ()))


def _resolved(value: object, document: Document, path: tuple[str | int, ...]) -> Iterator[ResolvedKey]:
    inner: list[tuple[str | int, object]]
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        inner = [(info.alias or name, getattr(value, name)) for name, info in fields.items()]
    elif isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, tuple | list) and any(isinstance(each, BaseModel) for each in value):
        inner = [(index, each) for index, each in enumerate(value)]
    else:
        key = key_text(path)
        if isinstance(value, str) and path[-1] == "url":
            value = shown_url(value)
        yield ResolvedKey(
            key, AUTO if value is None and key in AUTOMATIC else value, document.origin(path) or "default"
        )
        return
    for name, each in inner:
        yield from _resolved(each, document, (*path, name))


def read_secret(secret: SecretSection, environment: Mapping[str, str] | None = None) -> str:
    """A password or a token, without its line end. Raises SecretMissing with the place that was searched."""
    if secret.file is not None:
        file = secret.file
    else:
        folder = (os.environ if environment is None else environment).get(CREDENTIALS)
        if folder is None:
            raise SecretMissing(f"credential {secret.credential}", "no credentials here: systemd gives them to a unit")
        file = Path(folder) / str(secret.credential)
    try:
        text = file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SecretMissing(str(file), getattr(error, "strerror", None) or "not text in UTF-8") from error
    if not text:
        raise SecretMissing(str(file), "it is empty")
    return text


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Settings from systemd. ``watchdog_s``: longest silence; ``takes_levels``: stderr lines begin with a level."""

    notify_socket: str | None = None
    watchdog_s: float | None = None
    takes_levels: bool = False


def service_manager(environment: Mapping[str, str] | None = None) -> ServiceManager:
    given = os.environ if environment is None else environment
    watchdog_us, process = given.get("WATCHDOG_USEC", ""), given.get("WATCHDOG_PID", str(os.getpid()))
    watches_us = watchdog_us.isdigit() and int(watchdog_us) > 0 and process == str(os.getpid())
    return ServiceManager(
        given.get("NOTIFY_SOCKET") or None,
        int(watchdog_us) / 1_000_000 if watches_us else None,
        takes_levels=_is_journal(given.get("JOURNAL_STREAM", "")),
    )


def _is_journal(stream: str) -> bool:
    """Whether stderr is systemd's stream DEVICE:INODE."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def torchrun_meeting(environment: Mapping[str, str] | None = None) -> Meeting | None:
    """Where ranks of other boxes are met, by torchrun's variables; None without them: all ranks are on this box."""
    given = os.environ if environment is None else environment
    if not {"MASTER_ADDR", "LOCAL_WORLD_SIZE"} <= given.keys():
        return None
    return Meeting(given["MASTER_ADDR"], int(given.get("MASTER_PORT", "29500")), int(given["LOCAL_WORLD_SIZE"]))


def set_unless_given(variables: Mapping[str, str], unless: Collection[str]) -> None:
    """Set variables that libraries read when they load, unless the user has set any of ``unless``."""
    if not any(name in os.environ for name in unless):
        os.environ.update(variables)


def set_spinning() -> None:
    """Let OpenMP's threads spin for 10,000 pauses, 30 us to 250 us, before they sleep, unless the environment says.

    Call before torch is loaded. The libraries' default of milliseconds is up to a tenth faster alone (ResNet18, 2
    cores). Beside other work, every tenth run of 9 ms took 640 ms with the default, and 54 ms with this setting.
    """
    set_unless_given(SPINNING, SPINNING_VARIABLES)


def overlay(document: Document, environment: Mapping[str, str]) -> Document:
    """The document, with each `COSERVE__A__B=value` of the environment replacing its `a: {b: ...}`."""
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX):
            keys = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            if not all(keys):
                raise ConfigError(f"environment variable {variable}: names no key - write COSERVE__SECTION__KEY")
            document = document.override(keys, environment[variable], variable)
    return document


def json_schema() -> dict[str, Any]:
    schema = LineSections.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "CoServe line file"}


def usage_probabilities(config: LineConfig, pass_rates: Mapping[str, float] | None = None) -> dict[str, float]:
    """Usage probability of each expert from the boards' quantities (CoServe, section 4.5); 0: unused. A component's
    share is its quantity over one board of each type; without boards all routes have equal shares. A route of texts
    counts as one more component. ``pass_rates`` as for ``ExpertGraph.usage``."""
    quantities = _quantities(config) | dict.fromkeys(config.catalog.texts, 1)
    total = sum(quantities.values())
    used = dict.fromkeys(config.catalog.experts, 0.0)
    for name, quantity in quantities.items():
        for expert, share in _used_by(name, config, pass_rates or {}).items():
            used[expert] += share * quantity / total
    return used


def component_shares(config: LineConfig) -> dict[str, float]:
    """Share of each component's images: by quantity over one board of each type; without boards, equal shares."""
    quantities = _quantities(config)
    total = sum(quantities.values())
    return {component: quantity / total for component, quantity in quantities.items()}


def _quantities(config: LineConfig) -> dict[str, int]:
    quantities: Counter[str] = Counter()
    for board in config.boards.values():
        quantities.update(board.quantities)
    return quantities or dict.fromkeys(config.catalog.components, 1)


def _used_by(route: str, config: LineConfig, pass_rates: Mapping[str, float]) -> dict[str, float]:
    """Usage of each expert by one request of a route. A text's rules and their default are equally likely."""
    texts = config.catalog.texts.get(route)
    if texts is None:
        return config.catalog.graph.usage({route: 1.0}, pass_rates)
    ways = len(texts.rules) + 1
    used = config.catalog.graph.usage({route: 1 / ways}, pass_rates) if texts.steps else {}
    ends = [rule.expert for rule in texts.rules]
    if not texts.steps and texts.otherwise is not None:
        ends.append(texts.otherwise)
    for expert in ends:
        used[expert] = used.get(expert, 0.0) + 1 / ways
    return used


def _precision_problems(sections: LineSections, document: Document) -> Iterator[ConfigError]:
    images = next((name for name, section in sections.experts.items() if not is_llm(section)), None)
    given = sections.precision
    if isinstance(given, Precision) and not form_of(given).packs_modules and images is not None:
        others = " and ".join(name for name, form in FORMS.items() if form.needs_calibration)
        yield document.error(
            f"{given} is for language models alone, and {images} takes images - write precision: {given} at each "
            f"language model; eight bits for experts of images are {others}",
            "precision",
        )


def _board_problems(sections: LineSections, document: Document) -> Iterator[ConfigError]:
    for name, board in sections.boards.items():
        for component in board.components:
            where = ("boards", name, "components", component)
            yield from _route_problems(
                component, sections.routes, document, where, "add its route, or take it off the board"
            )


def _route_problems(
    component: str | None, routes: Collection[str], document: Document, where: KeyPath, advice: str = "add its route"
) -> Iterator[ConfigError]:
    if component is not None and component not in routes:
        yield document.error(f"no route for {component!r} - {suggestion(component, routes, advice)}", *where)


def _board_type_problems(
    board_type: str, sections: LineSections, document: Document, where: KeyPath
) -> Iterator[ConfigError]:
    if board_type not in sections.boards:
        hint = suggestion(board_type, sections.boards, "add it to boards:")
        yield document.error(f"no board type {board_type!r} - {hint}", *where)


def _folder_problems(
    sections: LineSections, layouts: Mapping[str, LayoutSections], document: Document
) -> Iterator[ConfigError]:
    for index, folder in enumerate(sections.intake.folders):
        where = ("intake", "folders", index)
        yield from _route_problems(folder.component, sections.routes, document, (*where, "component"))
        if folder.board_type is not None:
            yield from _board_type_problems(folder.board_type, sections, document, (*where, "board_type"))
            if (board := sections.boards.get(folder.board_type)) is not None and board.layout is None:
                lack = f"board type {folder.board_type!r} has no layout to cut the image by - add layout: to it"
                yield document.error(lack, *where, "board_type")
        groups = None if folder.pattern is None or folder.shows_boards else re.compile(folder.pattern).groupindex
        if len(sections.boards) > 1 and groups is not None and TYPE_GROUP not in groups:
            lack = f"the board type of a file is unclear: {', '.join(sections.boards)} - add a group (?P<type>...)"
            yield document.error(lack, *where, "pattern")
        others = [other.path for other in sections.intake.folders[:index]]
        if any(folder.path.is_relative_to(other) or other.is_relative_to(folder.path) for other in others):
            yield document.error("is inside or around another watched folder - watch each file once", *where, "path")
        layout = layouts.get(folder.board_type or "")
        if layout is not None and layout.size[0] * layout.size[1] > folder.max_pixels:
            frame = f"images of {layout.size[1]} x {layout.size[0]} pixels, as in its layout,"
            yield document.error(f"{frame} are more than {folder.max_pixels} - raise max_pixels", *where, "max_pixels")


def _camera_problems(sections: LineSections, document: Document) -> Iterator[ConfigError]:
    names = Counter(camera.name for camera in sections.intake.cameras)
    for index, camera in enumerate(sections.intake.cameras):
        where = ("intake", "cameras", index)
        if names[camera.name] > 1:
            yield document.error("two cameras have this name - name each differently", *where, "name")
        yield from _route_problems(camera.component, sections.routes, document, (*where, "component"))
        if camera.board_type is not None and camera.board_type not in sections.boards:
            yield from _board_type_problems(camera.board_type, sections, document, (*where, "board_type"))
        elif camera.component is None and camera.board_type is None and len(sections.boards) > 1:
            several = ", ".join(sections.boards)
            yield document.error(f"the board type of its frames is unclear: {several} - add board_type:", *where)
        elif camera.component is None:
            boards = [sections.boards[camera.board_type]] if camera.board_type else list(sections.boards.values())
            if not boards or any(board.layout is None for board in boards):
                lack = "a frame has neither a component nor a layout to cut it by"
                yield document.error(f"{lack} - add component:, or a layout: to its board", *where)


def _read_layout(file: Path, board: BoardSection, routes: Collection[str]) -> LayoutSections:
    """Read the layout of one board type. Raises ConfigError with all ``problems``."""
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file}: is no file - name the layout's file")  # a pipe would be waited for
    document = read_document(file)
    layout = document.validate(LayoutSections)
    problems: list[ConfigError] = []
    height_px, width_px = layout.size
    for ref, part in layout.parts.items():
        problems += _route_problems(part.component, routes, document, ("parts", ref, "component"))
        if part.box[2] > width_px or part.box[3] > height_px:
            problems.append(
                document.error(f"the box leaves the frame of {width_px} x {height_px}", "parts", ref, "box")
            )
    counts = Counter(part.component for part in layout.parts.values())
    quantities, listed, placed = board.quantities, board.refs, layout.refs
    for component in sorted(quantities.keys() | counts.keys()):
        expected, found = quantities.get(component, 0), counts[component]
        if expected == found and (differing := listed.get(component, placed[component]) ^ placed[component]):
            lack = f"{min(differing)!r} of {component!r} is only in one of the layout and its board - correct one"
            problems.append(document.error(lack, "parts"))
        if expected != found:
            lack = f"the layout has {found} parts of {component!r}, its board {expected} - correct one of them"
            problems.append(document.error(lack, "parts"))
    if problems:
        raise ConfigError.of(problems)
    return layout
