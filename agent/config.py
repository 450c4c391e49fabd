"""A line file (YAML) and the environment -> one frozen, typed configuration.

Precedence: environment > file > default: `COSERVE__SCHEDULING__MAX_OVERTAKE_S=2` is `scheduling: {max_overtake_s: 2}`.
All mistakes are reported at once, each with file, line and key or with the variable's name; nothing starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import BaseModel, Field, GetPydanticSchema, StrictBool
from pydantic_core.core_schema import any_schema

from agent.environment import overlay
from agent.line_file.api import ApiSection
from agent.line_file.boards import BoardSection, LayoutSections, board_problems, read_layout
from agent.line_file.cluster import ClusterSection
from agent.line_file.intake import IntakeSection, camera_problems, folder_problems
from agent.line_file.machine import (
    Device,
    ExecutorCounts,
    MemorySection,
    OptionalPrecision,
    PolicyName,
    SchedulingSection,
    precision_problems,
)
from agent.line_file.promotions import Promotion, kept_promotions, promoted
from agent.line_file.records import GoldenSection, OutboxSection, RecordsSection
from agent.line_file.texts import TextsSection, text_problems, text_routes_of
from agent.line_file.values import AUTO, Name, shown_url
from experts.catalog import Catalog, build_catalog
from experts.document import Document, key_text, read_document, suggestion
from experts.errors import ConfigError
from experts.expert import Precision
from experts.sections.experts import CatalogSections
from experts.sections.problems import catalog_problems
from experts.sections.values import FilePath

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.line_file.cluster import WorkerSection
    from agent.line_file.machine import GivenPrecision
    from experts.expert import Expert

PACKED = "packed"  # folder of packed weights in the state folder
AUTOMATIC = frozenset(
    {"memory.host", "memory.device", "memory.workspace", "memory.images", "precision", "executors", "texts.kv"}
)  # None: auto
AS_IT_IS = GetPydanticSchema(lambda *_: any_schema())  # made here, not read from a file


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
        "(the same by ONNX Runtime), these five on CPU executors, or int8 or int4, of language models alone",
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


class LineConfig(LineSections):
    """One line as configured: the sections of its file, and what they resolve to. Sizes in bytes; None: auto.

    ``catalog``: experts and routes. ``layouts``: by board type, where it has one. ``promotions``: in
    force. ``is_profile_strict``: a device profile of another box is an error instead of an alarm.
    """

    document: Annotated[Document, AS_IT_IS]
    catalog: Annotated[Catalog, AS_IT_IS]
    layouts: Annotated[Mapping[str, LayoutSections], AS_IT_IS]
    promotions: Annotated[tuple[Promotion, ...], AS_IT_IS] = ()
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
        own = {"device": kind.device, "executors": kind.executors, "memory": kind.memory}
        return self.model_copy(update={**own, "cluster": ClusterSection()})

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
        given: dict[str, Any] = {"policy": policy, "executors": executors}
        if memory is not None:
            given["memory"] = self.memory.model_copy(update=dict(memory))
        changes = {name: value for name, value in given.items() if value is not None}
        if precision is not None:
            changes["precision"] = None if precision == AUTO else Precision(precision)
        return self.model_copy(update=changes)


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
                layouts[name] = read_layout(board.layout, board, sections.routes)
            except ConfigError as error:
                problems += error.problems
    intake, routes, boards = sections.intake, sections.routes, sections.boards
    problems = [
        *catalog_problems(sections, document),
        *text_problems(sections.texts, sections, document),
        *precision_problems(sections.precision, sections, document),
        *board_problems(boards, routes, document),
        *folder_problems(intake, routes, boards, layouts, document),
        *camera_problems(intake, routes, boards, document),
        *problems,
    ]
    if problems:
        raise ConfigError.of(problems)
    catalog = build_catalog(sections, document, text_routes_of(sections.texts, sections), sections.state / PACKED)
    values = {**dict(sections), "api": sections.api.with_local_doors(sections.state)}
    return LineConfig.model_construct(
        **values, document=document, catalog=catalog, layouts=layouts, promotions=in_force
    )


def _resolved_document(
    document: Document, environment: Mapping[str, str] | None, promotions: Sequence[Promotion] | None = None
) -> tuple[Document, LineSections, tuple[Promotion, ...]]:
    """The document with variables and promotions in the place of its own values."""
    document = overlay(document, environment)
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


def json_schema() -> dict[str, Any]:
    schema = LineSections.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "CoServe line file"}
