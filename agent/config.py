"""A line file (YAML) and the environment -> one frozen, typed configuration. The only reader of the environment.

Precedence: environment > file > default: `COSERVE__SCHEDULING__MAX_OVERTAKE_S=2` is `scheduling: {max_overtake_s: 2}`.
Everything wrong is reported at once, with file, line and key or with the variable's name, and nothing starts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from ipaddress import ip_address
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from experts.catalog import (
    Catalog,
    CatalogSections,
    ComponentType,
    FilePath,
    Section,
    build_catalog,
    catalog_problems,
)
from experts.document import Document, read_document, suggestion
from experts.errors import ConfigError
from experts.expert import Precision
from experts.images import DEFAULT_MAX_PIXELS, LARGEST_MAX_PIXELS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

ENVIRONMENT_PREFIX = "COSERVE__"
AUTO = "auto"
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B|B)")
UNIT_BYTES = {"B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for binary in ("", "i")
}
PROCESSORS = ("cuda", "cpu", "mps", "emulated")
MAX_EXECUTORS = 64
PolicyName = Literal["coserve", "paper", "samba", "samba-fifo", "samba-parallel", "none", "em", "em-ra"]
Device = Literal["auto", "cpu", "cuda", "mps", "emulated"]
ReadyMode = Literal["auto", "rename", "marker", "stable"]
NAME_GROUPS = ("board", "component", "ref")  # what a file's name must tell
TYPE_GROUP = "type"  # and, where several board types are configured, this


def size_bytes(text: str) -> int:
    """`4GiB`, `512MiB` or `1.5GB` in bytes. Raises ValueError for anything else, a number without unit included."""
    found = SIZE.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not a size - write a number and a unit, such as 512MiB or 4GiB")
    return int(float(found[1]) * UNIT_BYTES[found[2]])


def _optional_size(value: object) -> int | None:
    if value == AUTO:
        return None
    bytes_ = size_bytes(str(value))
    if bytes_ < 1:
        raise ValueError(f"{value!r} is no memory at all - write auto, or a size such as 4GiB")
    return bytes_


def _optional_precision(value: object) -> object:
    return None if value == AUTO else value


def _executors(value: object) -> object:
    if value == AUTO:
        return None
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{value!r} is neither auto nor counts - write auto, or {{cuda: 3, cpu: 1}}")
    for processor, count in value.items():
        if processor not in PROCESSORS:
            raise ValueError(f"no processor {processor!r} - {suggestion(processor, PROCESSORS)}")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_EXECUTORS:
            raise ValueError(f"{processor}: {count!r} is not a count from 0 to {MAX_EXECUTORS} - correct it")
    if not any(value.values()):
        raise ValueError("no executor at all - give one processor at least 1")
    return value


def _address(text: str, info: ValidationInfo) -> str:
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise ValueError("an address without a path - write unix:./state/coserve.sock")
        folder: Path = (info.context or {})["folder"]
        return f"unix:{(folder / path).absolute()}"
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address - write unix:PATH or 127.0.0.1:PORT, a port from 0 to 65535")
    if not _is_loopback(host.removeprefix("[").removesuffix("]")):
        raise ValueError(f"{host!r} can be reached from other machines - this version serves 127.0.0.1 and [::1] only")
    return text


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error}) - correct it") from error
    return text


SIZE_SCHEMA = WithJsonSchema({"type": "string", "pattern": f"^(auto|{SIZE.pattern})$", "default": AUTO})
OptionalSize = Annotated[int | None, BeforeValidator(_optional_size), SIZE_SCHEMA]
OptionalPrecision = Annotated[
    Precision | None,
    BeforeValidator(_optional_precision),
    WithJsonSchema({"enum": [AUTO, *Precision], "default": AUTO}),
]
COUNT_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_EXECUTORS}
ExecutorCounts = Annotated[
    dict[str, int] | None,
    BeforeValidator(_executors),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": AUTO},
                {
                    "type": "object",
                    "properties": dict.fromkeys(PROCESSORS, COUNT_SCHEMA),
                    "additionalProperties": False,
                },
            ],
            "default": AUTO,
        }
    ),
]
Address = Annotated[str, AfterValidator(_address)]
Addresses = Annotated[
    tuple[Address, ...],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "default": []}),
]
Seconds = Annotated[float, Field(strict=True, gt=0, le=86_400)]


class BoardSection(Section):
    """One board type: what is expected of each board, and how long it may take."""

    components: dict[ComponentType, Annotated[int, Field(strict=True, ge=1, le=100_000)]] = Field(
        min_length=1, description="component type -> how many a board has, 1 to 100000; each needs a route"
    )
    takt_s: Seconds = Field(60.0, description="time from one board to the next, in seconds, up to 86400; default 60")
    timeout_s: Seconds | None = Field(
        None,
        description="seconds from a board's first result until what is missing makes it UNKNOWN, of those in which the "
        "agent runs; default 2 x takt_s",
    )

    @property
    def patience_s(self) -> float:
        """``timeout_s``, or its default."""
        return 2 * self.takt_s if self.timeout_s is None else self.timeout_s


class MemorySection(Section):
    """Budgets in bytes; None = as the device allows."""

    host: OptionalSize = Field(None, description="host memory for experts: auto or a size (4GiB); default auto")
    device: OptionalSize = Field(None, description="device memory for experts: auto or a size (4GiB); default auto")
    workspace: OptionalSize = Field(
        None,
        description="memory kept for running batches, of each: auto (the device profile's; without one what batches "
        "can use, a quarter at most) or a size (1GiB); default auto",
    )


class SchedulingSection(Section):
    """Bounds of the scheduler."""

    max_overtake_s: Seconds = Field(
        5.0, description="longest that a request may be overtaken by requests of other experts, seconds; default 5"
    )


class FolderSection(Section):
    """One watched folder."""

    path: FilePath = Field(description="folder to watch, subfolders included, relative to this file")
    pattern: Annotated[str, AfterValidator(_pattern)] = Field(
        description="regular expression of whole file names (of the path below the folder, if it holds a `/`) "
        "with the groups board, component and ref, and type where there are several board types"
    )
    component: ComponentType | None = Field(
        None, description="component type of every file here, in place of the pattern's group; default: the group"
    )
    ready: ReadyMode = Field(
        "auto",
        description="what shows that a file is complete: rename (it appears whole), marker (NAME.done beside it), "
        "stable (it stops changing), or auto: any of them; default auto",
    )
    settle_ms: int | None = Field(
        None,
        strict=True,
        ge=0,
        le=600_000,
        description="how long a file must stay unchanged, in ms, 0 to 600000; default 200 once its writer closed it, "
        "2000 where that cannot be seen",
    )
    poll_s: float = Field(
        2.0,
        strict=True,
        ge=0.05,
        le=3600,
        description="seconds between two looks at the folder, 0.05 to 3600; default 2",
    )
    stale_after_s: Seconds = Field(
        60.0,
        description="a file that is incomplete, or may not be read, and that nobody writes, is UNKNOWN after so many "
        "seconds; default 60",
    )
    after: Literal["keep", "move", "delete"] = Field(
        "move",
        description="what becomes of a judged file: keep (stays), move (to done/ or ng/), delete; "
        "UNKNOWN ones move to failed/ unless kept; default move",
    )
    ignore_existing: bool = Field(
        False, strict=True, description="true: files that are there at the start stay unjudged; default false"
    )
    max_pixels: int = Field(
        DEFAULT_MAX_PIXELS,
        strict=True,
        ge=1,
        le=LARGEST_MAX_PIXELS,
        description=f"larger images are refused, in pixels, 1 to {LARGEST_MAX_PIXELS}; default {DEFAULT_MAX_PIXELS}",
    )

    @model_validator(mode="after")
    def _names_tell_everything(self) -> FolderSection:
        groups = re.compile(self.pattern).groupindex
        missing = [name for name in NAME_GROUPS if name not in groups and not (name == "component" and self.component)]
        if missing:
            raise ValueError(f"the pattern has no group {', '.join(missing)} - add (?P<{missing[0]}>...)")
        if self.component and "component" in groups:
            raise ValueError("component is both a key and a group of the pattern - keep one")
        unknown = sorted(set(groups) - {*NAME_GROUPS, TYPE_GROUP})
        if unknown:
            raise ValueError(
                f"nobody reads the group {unknown[0]!r} - {suggestion(unknown[0], (*NAME_GROUPS, TYPE_GROUP))}"
            )
        return self


class IntakeSection(Section):
    """Where images come from."""

    folders: tuple[FolderSection, ...] = Field((), description="watched folders; default none")
    cameras: tuple[Any, ...] = Field((), description="must be empty: cameras are not in this version")

    @field_validator("cameras")
    @classmethod
    def _no_camera(cls, cameras: tuple[Any, ...]) -> tuple[Any, ...]:
        if cameras:
            raise ValueError("cameras are not in this version - write `cameras: []` and watch a folder")
        return cameras


class ApiSection(Section):
    """Addresses of the APIs; checked now, served by a later version."""

    grpc: Addresses = Field((), description="unix:PATH or loopback HOST:PORT, one or a list; default none")
    http: Addresses = Field((), description="unix:PATH or loopback HOST:PORT, one or a list; default none")


class LineSections(CatalogSections):
    """A whole line file."""

    line: str = Field(pattern=r"^\w[\w.-]*$", description="name of this installation: letters, digits, `_`, `.`, `-`")
    state: FilePath = Field(description="folder of databases and packed weights, relative to this file")
    boards: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], BoardSection] = Field(
        {}, description="board types: quantities give usage probabilities and the board verdict; default none"
    )
    memory: MemorySection = Field(MemorySection(), description="memory budgets; default auto")
    precision: OptionalPrecision = Field(
        None,
        description="auto (the fastest that the device profile found to agree with fp32; without one fp32), fp32, "
        "bf16, fp16 or onnxruntime (fp32 by ONNX Runtime, on CPU executors); default auto",
    )
    device: Device = Field("auto", description="auto, cpu, cuda, mps or emulated; default auto")
    executors: ExecutorCounts = Field(
        None,
        description="auto (the device profile's; without one a rule) or executors per processor, {cuda: 3, cpu: 1}; "
        "default auto",
    )
    policy: PolicyName = Field(
        "coserve",
        description="coserve, paper, samba, samba-fifo, samba-parallel, none, em or em-ra; default coserve",
    )
    scheduling: SchedulingSection = Field(SchedulingSection(), description="bounds of the scheduler")
    intake: IntakeSection = Field(IntakeSection(), description="where images come from")
    api: ApiSection = Field(ApiSection(), description="addresses of the APIs; default none")


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
    intake: IntakeSection
    api: ApiSection
    document: Document

    @property
    def results_file(self) -> Path:
        """Where its verdicts lie."""
        return self.state / "results.db"

    @property
    def packed_folder(self) -> Path:
        """Where its packed weights lie."""
        return self.state / "packed"

    @property
    def profile_file(self) -> Path:
        """Where the device profile of its box lies."""
        return self.state / "profile.db"

    def having(
        self,
        *,
        policy: str | None = None,
        memory: Mapping[str, int] | None = None,
        executors: Mapping[str, int] | None = None,
        precision: Precision | None = None,
    ) -> LineConfig:
        """The line with these in the place of what the file says; None: as it says. ``memory``: bytes by name.

        Raises ConfigError for a policy or a memory that there is none of.
        """
        policies = get_args(PolicyName)
        if policy is not None and policy not in policies:
            raise ConfigError(f"no policy {policy!r} - {suggestion(policy, policies)}")
        unknown = sorted((memory or {}).keys() - MemorySection.model_fields.keys())
        if unknown:
            raise ConfigError(f"no memory is called {', '.join(unknown)} - use host, device or workspace")
        return replace(
            self,
            policy=self.policy if policy is None else cast("PolicyName", policy),
            memory=self.memory.model_copy(update=dict(memory or {})),
            executors=self.executors if executors is None else executors,
            precision=precision or self.precision,
        )


def read_line(path: Path, environment: Mapping[str, str] | None = None) -> LineConfig:
    """Read and validate one line file under this environment (default: the process's own).

    Raises ConfigError, whose ``problems`` are all that was found.
    """
    document = overlay(read_document(path.absolute()), os.environ if environment is None else environment)
    sections = document.validate(LineSections)
    problems = [*catalog_problems(sections, document), *_board_problems(sections, document)]
    if problems:
        raise ConfigError.of(problems)
    return LineConfig(
        line=sections.line,
        state=sections.state,
        catalog=build_catalog(sections, document),
        boards=MappingProxyType(sections.boards),
        memory=sections.memory,
        precision=sections.precision,
        device=sections.device,
        executors=None if sections.executors is None else MappingProxyType(sections.executors),
        policy=sections.policy,
        scheduling=sections.scheduling,
        intake=sections.intake,
        api=sections.api,
        document=document,
    )


def set_unless_given(variables: Mapping[str, str], unless: Collection[str]) -> bool:
    """Set variables of this process for libraries that read them when they load, if none of ``unless`` is there.

    What whoever started the process has set comes first, so a single one keeps all of these away. Whether they are set.
    """
    if any(name in os.environ for name in unless):
        return False
    for name, value in variables.items():
        os.environ[name] = value
    return True


def environment_with(variables: Mapping[str, str], without: Collection[str]) -> dict[str, str]:
    """The environment of a process to start: this one's, with these variables, and else none of ``without``."""
    return {name: value for name, value in os.environ.items() if name not in without} | dict(variables)


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
    """The JSON Schema of a line file, for editors."""
    schema = LineSections.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "CoServe line file"}


def usage_probabilities(config: LineConfig, pass_rates: Mapping[str, float] | None = None) -> dict[str, float]:
    """How likely a request is to use each expert, from the boards' quantities (CoServe, section 4.5).

    A component's share is its quantity among all components of all board types, one board of each; without boards all
    routes share alike. ``pass_rates`` as for ``ExpertGraph.usage``. An expert that no board uses has 0.
    """
    used = config.catalog.graph.usage(component_shares(config), pass_rates or {})
    return dict.fromkeys(config.catalog.experts, 0.0) | used


def component_shares(config: LineConfig) -> dict[str, float]:
    """How likely a request is of each component: by quantity over one board of each type; without boards all alike."""
    quantities: dict[str, int] = {}
    for board in config.boards.values():
        for component, quantity in board.components.items():
            quantities[component] = quantities.get(component, 0) + quantity
    if not quantities:
        quantities = dict.fromkeys(config.catalog.graph.routes, 1)
    total = sum(quantities.values())
    return {component: quantity / total for component, quantity in quantities.items()}


def _board_problems(sections: LineSections, document: Document) -> Iterator[ConfigError]:
    for name, board in sections.boards.items():
        for component in board.components:
            if component not in sections.routes:
                hint = suggestion(component, sections.routes, "add its route, or take it off the board")
                yield document.error(f"no route for {component!r} - {hint}", "boards", name, "components", component)
    for index, folder in enumerate(sections.intake.folders):
        where = ("intake", "folders", index)
        if folder.component and folder.component not in sections.routes:
            hint = suggestion(folder.component, sections.routes, "add its route")
            yield document.error(f"no route for {folder.component!r} - {hint}", *where, "component")
        if len(sections.boards) > 1 and TYPE_GROUP not in re.compile(folder.pattern).groupindex:
            several = ", ".join(sections.boards)
            yield document.error(
                f"which of {several} is a file's board? - add a group (?P<type>...)", *where, "pattern"
            )
        others = [other.path for other in sections.intake.folders[:index]]
        if any(
            folder.path == other or folder.path in other.parents or other in folder.path.parents for other in others
        ):
            yield document.error("lies in, or around, another watched folder - watch each file once", *where, "path")
