"""Sections of records and outbox: retention, export, receivers."""

from __future__ import annotations

import re
from datetime import time, timedelta
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from agent.line_file.values import Seconds, SecretSection
from experts.sections.values import FilePath, Section, Size


def _mqtt_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"mqtt", "mqtts"} or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"{text!r} is not a broker - write mqtt://HOST:1883, or mqtts://HOST:8883 for TLS")
    if parts.username or parts.password:
        raise ValueError("the url contains a login - write user: and password: {file: ...} instead")
    return text


def _web_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{text!r} is not a web address - write http://HOST/PATH or https://HOST/PATH")
    if parts.username or parts.password:
        raise ValueError("the url contains a login - write token: {file: ...} instead")
    return text


def _time_of_day(value: object) -> time:
    if not re.fullmatch(TIME_OF_DAY, str(value)):
        raise ValueError(f"{value!r} is not a time of day - write it as '06:00'")
    return time.fromisoformat(str(value))


TIME_OF_DAY = r"([01]\d|2[0-3]):[0-5]\d"
TimeOfDay = Annotated[
    time, BeforeValidator(_time_of_day), WithJsonSchema({"type": "string", "pattern": f"^{TIME_OF_DAY}$"})
]


class KeepSection(Section):
    """Limits of retention; without any, results and images stay for ever. OK images go before NG."""

    days: Annotated[int, Field(strict=True, ge=1, le=36_500)] | None = Field(
        None, description="days after which rows and images go"
    )
    size: Size | None = Field(None, description="most bytes of images; oldest OK go first, NG last")
    free: Size | None = Field(None, description="least free bytes of the disk, by removing images")
    export_required: bool = Field(False, strict=True, description="true: results stay until exported")


class ExportSection(Section):
    """Files of results for other programs."""

    folder: FilePath = Field(description="folder of the files, relative to this file")
    format: Literal["csv", "jsonl"] = Field("csv", description="csv or jsonl")
    bom: bool = Field(False, strict=True, description="true: csv begins with a byte order mark, as Excel needs it")


EVERY = r"shift|day|[1-9]\d{0,4}[hm]"


def _every(value: object) -> timedelta | str:
    text = str(value)
    if not re.fullmatch(EVERY, text):
        raise ValueError(f"{value!r} is no interval - write shift, day, or hours or minutes such as 8h or 30m")
    if text in {"shift", "day"}:
        return text
    return timedelta(**{"hours" if text[-1] == "h" else "minutes": int(text[:-1])})


class GoldenSection(Section):
    """Known answers that are compared again while the line is idle."""

    every: Annotated[
        timedelta | Literal["shift", "day"],
        BeforeValidator(_every),
        WithJsonSchema({"type": "string", "pattern": f"^({EVERY})$"}),
    ] = Field(description="shift (records.shifts), day, or an interval such as 8h or 30m")
    on_difference: Literal["alarm", "stop"] = Field(
        "alarm",
        description="alarm, or stop: also no OK by an expert that answers otherwise, until it is verified",
    )


class RecordsSection(Section):
    """Kept images, retention and export."""

    images: Literal["none", "ng", "all"] = Field(
        "ng",
        description="images of cameras and API to keep: none, ng (also UNKNOWN), all",
    )
    keep: KeepSection = Field(KeepSection(), description="retention; default for ever")
    export: ExportSection | None = Field(None, description="files of all results, one an hour")
    shifts: tuple[TimeOfDay, ...] = Field(
        (time(6), time(14), time(22)),
        min_length=1,
        description="local times at which a shift begins; a review can be undone in its shift",
    )

    @model_validator(mode="after")
    def _is_exported_if_required(self) -> RecordsSection:
        if self.keep.export_required and self.export is None:
            raise ValueError("export_required keeps everything for ever without an export - add export: {folder: ...}")
        return self


TOPIC = r"^[^+#\x00-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff]+$"  # without wildcards and what MQTT 1.5.3 forbids


class MqttSection(Section):
    """MQTT broker: each verdict is published at least once."""

    url: Annotated[str, AfterValidator(_mqtt_url)] = Field(description="mqtt://HOST:1883, or mqtts://HOST:8883 for TLS")
    topic: str = Field("coserve", pattern=TOPIC, description="first part of every topic")
    client_id: str | None = Field(None, description="MQTT client id; default coserve-LINE")
    user: str | None = Field(None, description="user name")
    password: SecretSection | None = Field(None, description="that user's: {credential: NAME} or {file: PATH}")
    ca: FilePath | None = Field(None, description="mqtts: PEM file of the authority to trust; default the system's")

    @model_validator(mode="after")
    def _is_consistent(self) -> MqttSection:
        if self.password is not None and self.user is None:
            raise ValueError("a password without a user - add user:")
        if self.ca is not None and not self.url.startswith("mqtts:"):
            raise ValueError("ca is for mqtts: - write the url with mqtts://")
        return self


class WebhookSection(Section):
    """Web address: each verdict is posted at least once."""

    url: Annotated[str, AfterValidator(_web_url)] = Field(description="http://HOST/PATH or https://HOST/PATH")
    token: SecretSection | None = Field(None, description="sent as authorization: Bearer TOKEN; default nothing")
    ca: FilePath | None = Field(None, description="https: PEM file of the authority to trust; default the system's")
    timeout_s: Seconds = Field(10.0, description="longest wait for an answer, seconds")


class OutboxSection(Section):
    """Receivers of stored verdicts, retried until they acknowledge."""

    events: tuple[Literal["board", "ng", "result", "alarm"], ...] = Field(
        ("board", "ng", "alarm"),
        min_length=1,
        description="board (each board's verdict), ng (each image that is NG or UNKNOWN), result (each image), alarm "
        "(raised or cleared)",
    )
    limit: Annotated[int, Field(strict=True, ge=100, le=10_000_000)] = Field(
        100_000,
        description="messages that may wait for one receiver; the oldest are dropped, and counted",
    )
    per_s: Annotated[float, Field(strict=True, gt=0, le=100_000)] = Field(
        200.0, description="most messages a second to one receiver, also from a backlog"
    )
    most_boxes: Annotated[int, Field(strict=True, ge=0, le=100_000)] = Field(
        200,  # 1000 boxes are 160 kB, and AWS IoT takes 128 KiB
        description="most boxes of an image in its message, which has their whole number as boxes_total",
    )
    mqtt: MqttSection | None = Field(None, description="an MQTT broker")
    webhook: WebhookSection | None = Field(None, description="a web address")
