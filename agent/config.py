"""A line file (YAML) and the environment -> one frozen, typed configuration. The only reader of the environment.

Precedence: environment > file > default: `COSERVE__SCHEDULING__MAX_OVERTAKE_S=2` is `scheduling: {max_overtake_s: 2}`.
Everything wrong is reported at once, with file, line and key or with the variable's name, and nothing starts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast, get_args

from pydantic import BaseModel, Field

from agent.line_file.api import ApiSection
from agent.line_file.boards import BoardSection, LayoutSections
from agent.line_file.intake import TYPE_GROUP, IntakeSection
from agent.line_file.machine import (
    Device,
    ExecutorCounts,
    MemorySection,
    OptionalPrecision,
    PolicyName,
    SchedulingSection,
)
from agent.line_file.records import OutboxSection, RecordsSection
from agent.line_file.texts import TextsSection, text_problems, text_routes_of
from agent.line_file.values import AUTO, Name, shown_url
from experts.backends.forms import FORMS, form_of
from experts.catalog import Catalog, CatalogSections, FilePath, build_catalog, catalog_problems, is_llm
from experts.document import Document, key_text, read_document, suggestion
from experts.errors import ConfigError, SecretMissing
from experts.expert import Precision

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from agent.line_file.intake import CameraSection
    from agent.line_file.machine import GivenPrecision
    from agent.line_file.values import SecretSection
    from experts.document import KeyPath
    from experts.expert import Expert

ENVIRONMENT_PREFIX = "COSERVE__"
PACKED = "packed"  # folder of packed weights in the state folder
AUTOMATIC = frozenset(
    {"memory.host", "memory.device", "memory.workspace", "memory.images", "precision", "executors", "texts.kv"}
)  # None: auto
CREDENTIALS = "CREDENTIALS_DIRECTORY"  # where systemd puts what LoadCredential= names


class LineSections(CatalogSections):
    """A whole line file."""

    line: Name = Field(description="name of this installation: letters, digits, `_`, `.`, `-`")
    state: FilePath = Field(description="folder of databases and packed weights, relative to this file")
    boards: dict[Name, BoardSection] = Field(
        {}, description="board types: quantities give usage probabilities and the board verdict; default none"
    )
    memory: MemorySection = Field(MemorySection(), description="memory budgets; default auto")
    precision: OptionalPrecision = Field(
        None,
        description="auto (the fastest that the device profile found to agree with fp32; without one fp32, language "
        "models as they are stored), fp32, bf16, fp16, onnxruntime (fp32 by ONNX Runtime), onednn-fp32, onednn-bf16 or "
        "onednn-int8 (by oneDNN, fused; eight bits for experts that `coserve profile` calibrated), onnxruntime-int8 "
        "(the same by ONNX Runtime), these five on CPU executors, or int8, of language models alone; default auto",
    )
    device: Device = Field("auto", description="auto, cpu, cuda, mps, emulated or integrated; default auto")
    executors: ExecutorCounts = Field(
        None,
        description="auto (the device profile's; without one a rule) or executors per processor, {cuda: 3, cpu: 1}; "
        "default auto",
    )
    policy: PolicyName = Field(
        "coserve", description="coserve, paper, samba, samba-fifo, samba-parallel, none, em or em-ra; default coserve"
    )
    scheduling: SchedulingSection = Field(SchedulingSection(), description="bounds of the scheduler")
    texts: TextsSection = Field(TextsSection(), description="texts for language models: their memory, time and routes")
    intake: IntakeSection = Field(IntakeSection(), description="where images come from")
    api: ApiSection = Field(ApiSection(), description="addresses of the APIs; default none")
    records: RecordsSection = Field(RecordsSection(), description="what is kept, and for how long")
    outbox: OutboxSection = Field(OutboxSection(), description="to whom verdicts are told; default nobody")


@dataclass(frozen=True, slots=True)
class LineConfig:
    """One line, as configured. Sizes in bytes; None stands for auto. ``document`` finds the place of any key."""

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
    layouts: Mapping[str, LayoutSections]  # board type -> where its parts lie, of those that have a layout
    document: Document
    is_profile_strict: bool = False  # a device profile of another box is an error, not an alarm

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
        """Precision of the file for an expert without its own; None: auto."""
        return None if expert.is_automatic else self.precision

    def having(
        self,
        *,
        policy: str | None = None,
        memory: Mapping[str, int] | None = None,
        executors: Mapping[str, int] | None = None,
        precision: GivenPrecision | None = None,
    ) -> LineConfig:
        """The line with these in the place of what the file says; None: as it says. ``memory``: bytes by name.
        ``precision``: as in a line file. Raises ConfigError for an unknown policy or memory."""
        policies = get_args(PolicyName)
        if policy is not None and policy not in policies:
            raise ConfigError(f"no policy {policy!r} - {suggestion(policy, policies)}")
        unknown = sorted((memory or {}).keys() - MemorySection.model_fields.keys())
        if unknown:
            raise ConfigError(f"no memory is called {', '.join(unknown)} - use host, device, workspace or images")
        return replace(
            self,
            policy=self.policy if policy is None else cast("PolicyName", policy),
            memory=self.memory.model_copy(update=dict(memory or {})),
            executors=self.executors if executors is None else executors,
            precision=self.precision if precision is None else None if precision == AUTO else Precision(precision),
        )


def read_line(path: Path, environment: Mapping[str, str] | None = None) -> LineConfig:
    """Read and validate a line file (``environment``: the process's own). Raises ConfigError with all ``problems``."""
    return line_of(read_document(path.absolute()), environment)


def line_of(document: Document, environment: Mapping[str, str] | None = None) -> LineConfig:
    """``read_line`` for a document in memory."""
    document = overlay(document, os.environ if environment is None else environment)
    sections = document.validate(LineSections)
    problems = [
        *catalog_problems(sections, document),
        *text_problems(sections.texts, sections, document),
        *_precision_problems(sections, document),
        *_board_problems(sections, document),
        *_folder_problems(sections, document),
        *_camera_problems(sections, document),
    ]
    layouts: dict[str, LayoutSections] = {}
    for name, board in sections.boards.items():
        if board.layout is not None:
            try:
                layouts[name] = read_layout(board.layout, board, sections.routes)
            except ConfigError as error:
                problems += error.problems
    problems += _size_problems(sections, layouts, document)
    if problems:
        raise ConfigError.of(problems)
    return LineConfig(
        line=sections.line,
        state=sections.state,
        catalog=build_catalog(sections, document, text_routes_of(sections.texts, sections), sections.state / PACKED),
        boards=MappingProxyType(sections.boards),
        memory=sections.memory,
        precision=sections.precision,
        device=sections.device,
        executors=None if sections.executors is None else MappingProxyType(sections.executors),
        policy=sections.policy,
        scheduling=sections.scheduling,
        texts=sections.texts,
        intake=sections.intake,
        api=sections.api.with_local_door(sections.state),
        records=sections.records,
        outbox=sections.outbox,
        layouts=MappingProxyType(layouts),
        document=document,
    )


@dataclass(frozen=True, slots=True)
class ResolvedKey:
    """One value that takes effect; no secrets in addresses. ``origin``: FILE:LINE, a variable, or `default`."""

    key: str
    value: object
    origin: str


def resolved_keys(path: Path, environment: Mapping[str, str] | None = None) -> list[ResolvedKey]:
    """Every value of a line file, defaults included, in the order of its sections. Raises ConfigError."""
    document = overlay(read_document(path.absolute()), os.environ if environment is None else environment)
    sections = document.validate(LineSections)
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
    """A password or a token, without the end of its line. Raises SecretMissing, which says where it was looked for."""
    if secret.file is not None:
        file = secret.file
    else:
        folder = (os.environ if environment is None else environment).get(CREDENTIALS)
        if folder is None:
            raise SecretMissing(f"credential {secret.credential}", "no credentials: systemd gives them to a unit")
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
    """Given by systemd. ``watchdog_s``: longest silence; ``takes_levels``: stderr lines begin with a level."""

    notify_socket: str | None = None
    watchdog_s: float | None = None
    takes_levels: bool = False


def service_manager(environment: Mapping[str, str] | None = None) -> ServiceManager:
    told = os.environ if environment is None else environment
    watchdog_us, process = told.get("WATCHDOG_USEC", ""), told.get("WATCHDOG_PID", str(os.getpid()))
    watches_us = watchdog_us.isdigit() and int(watchdog_us) > 0 and process == str(os.getpid())
    return ServiceManager(
        told.get("NOTIFY_SOCKET") or None,
        int(watchdog_us) / 1_000_000 if watches_us else None,
        takes_levels=_is_journal(told.get("JOURNAL_STREAM", "")),
    )


def _is_journal(stream: str) -> bool:
    """Whether stderr is the stream DEVICE:INODE that systemd reads."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def set_unless_given(variables: Mapping[str, str], unless: Collection[str]) -> bool:
    """Set variables for libraries that read them when they load; False where the user has set any of ``unless``."""
    if any(name in os.environ for name in unless):
        return False
    for name, value in variables.items():
        os.environ[name] = value
    return True


def overlay(document: Document, environment: Mapping[str, str]) -> Document:
    """The document with every `COSERVE__A__B=value` of the environment in the place of its `a: {b: ...}`."""
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
    """Usage probability of each expert from the boards' quantities (CoServe, section 4.5); 0: unused.

    A component's share is its quantity over one board of each type; without boards all routes share alike. A route of
    texts counts as one component more. ``pass_rates`` as for ``ExpertGraph.usage``.
    """
    quantities = _quantities(config) | dict.fromkeys(config.catalog.texts, 1)
    total = sum(quantities.values())
    used = dict.fromkeys(config.catalog.experts, 0.0)
    for name, quantity in quantities.items():
        for expert, share in _used_by(name, config, pass_rates or {}).items():
            used[expert] += share * quantity / total
    return used


def component_shares(config: LineConfig) -> dict[str, float]:
    """Share of each component's images: by quantity over one board of each type; without boards all alike."""
    quantities = _quantities(config)
    total = sum(quantities.values())
    return {component: quantity / total for component, quantity in quantities.items()}


def _quantities(config: LineConfig) -> dict[str, int]:
    quantities: dict[str, int] = {}
    for board in config.boards.values():
        for component, quantity in board.components.items():
            quantities[component] = quantities.get(component, 0) + quantity
    return quantities or dict.fromkeys(config.catalog.components, 1)


def _used_by(route: str, config: LineConfig, pass_rates: Mapping[str, float]) -> dict[str, float]:
    """Usage of each expert by one request of a route; a text's rules and its rest are equally likely."""
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
            f"{given} is for language models alone, and {images} takes images - give it to each language model as its "
            f"own precision: {given}; eight bits for experts of images are {others}",
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


def _folder_problems(sections: LineSections, document: Document) -> Iterator[ConfigError]:
    for index, folder in enumerate(sections.intake.folders):
        where = ("intake", "folders", index)
        yield from _route_problems(folder.component, sections.routes, document, (*where, "component"))
        if folder.board_type is not None:
            yield from _board_type_problems(folder.board_type, sections, document, (*where, "board_type"))
            if (board := sections.boards.get(folder.board_type)) is not None and board.layout is None:
                advice = f"the board type {folder.board_type!r} has no layout to cut by - add layout: to it"
                yield document.error(advice, *where, "board_type")
        groups = None if folder.pattern is None or folder.shows_boards else re.compile(folder.pattern).groupindex
        if len(sections.boards) > 1 and groups is not None and TYPE_GROUP not in groups:
            several = ", ".join(sections.boards)
            yield document.error(
                f"which of {several} is a file's board? - add a group (?P<type>...)", *where, "pattern"
            )
        others = [other.path for other in sections.intake.folders[:index]]
        if any(folder.path.is_relative_to(other) or other.is_relative_to(folder.path) for other in others):
            yield document.error("lies in, or around, another watched folder - watch each file once", *where, "path")


def _size_problems(
    sections: LineSections, layouts: Mapping[str, LayoutSections], document: Document
) -> Iterator[ConfigError]:
    for index, folder in enumerate(sections.intake.folders):
        layout = layouts.get(folder.board_type or "")
        if layout is not None and layout.size[0] * layout.size[1] > folder.max_pixels:
            height_px, width_px = layout.size
            yield document.error(
                f"images of {width_px} x {height_px} pixels, as its layout is for, are more than {folder.max_pixels} - "
                "raise max_pixels",
                "intake", "folders", index, "max_pixels",
            )  # fmt: skip


def _camera_problems(sections: LineSections, document: Document) -> Iterator[ConfigError]:
    names = Counter(camera.name for camera in sections.intake.cameras)
    for index, camera in enumerate(sections.intake.cameras):
        where = ("intake", "cameras", index)
        if names[camera.name] > 1:
            yield document.error("two cameras have this name - give each its own", *where, "name")
        yield from _route_problems(camera.component, sections.routes, document, (*where, "component"))
        if camera.board_type is not None and camera.board_type not in sections.boards:
            yield from _board_type_problems(camera.board_type, sections, document, (*where, "board_type"))
        elif camera.component is None and camera.board_type is None and len(sections.boards) > 1:
            several = ", ".join(sections.boards)
            yield document.error(f"which of {several} does it see? - add board_type:", *where)
        elif camera.component is None and not _has_layout(camera, sections):
            yield document.error(
                "what does a frame show? - add component:, or a layout: to its board, by which frames are cut", *where
            )


def _has_layout(camera: CameraSection, sections: LineSections) -> bool:
    names = [camera.board_type] if camera.board_type else list(sections.boards)
    return bool(names) and all(sections.boards[name].layout is not None for name in names)


def read_layout(file: Path, board: BoardSection, routes: Collection[str]) -> LayoutSections:
    """Read the layout of one board type. Raises ConfigError, whose ``problems`` are all that was found."""
    document = read_document(file)
    layout = document.validate(LayoutSections)
    problems = [*_part_problems(layout, document, routes)]
    counts = Counter(part.component for part in layout.parts.values())
    for component in sorted(board.components.keys() | counts.keys()):
        wanted, there = board.components.get(component, 0), counts[component]
        if wanted != there:
            problems.append(document.error(f"{there} parts of {component!r}, where its board has {wanted}", "parts"))
    if problems:
        raise ConfigError.of(problems)
    return layout


def _part_problems(layout: LayoutSections, document: Document, routes: Collection[str]) -> Iterator[ConfigError]:
    height_px, width_px = layout.size
    for ref, part in layout.parts.items():
        yield from _route_problems(part.component, routes, document, ("parts", ref, "component"))
        if part.box[2] > width_px or part.box[3] > height_px:
            yield document.error(f"the box leaves the frame of {width_px} x {height_px}", "parts", ref, "box")
