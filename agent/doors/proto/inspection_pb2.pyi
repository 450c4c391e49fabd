# Made by `make proto`, not by hand. Source: coserve/v1/inspection.proto
# sha256 of the source: 0ae56b51902fda1d3305db0aa3a6ec990395b9d6a371152ea90f37451e72657d
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNKNOWN: _ClassVar[Verdict]
    VERDICT_OK: _ClassVar[Verdict]
    VERDICT_NG: _ClassVar[Verdict]
VERDICT_UNKNOWN: Verdict
VERDICT_OK: Verdict
VERDICT_NG: Verdict

class Pixels(_message.Message):
    __slots__ = ("height", "width", "rgb")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    RGB_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    rgb: bytes
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., rgb: _Optional[bytes] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("file", "pixels", "component", "expert", "board", "board_type", "ref", "key", "is_question", "wants_maps")
    FILE_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    BOARD_TYPE_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    IS_QUESTION_FIELD_NUMBER: _ClassVar[int]
    WANTS_MAPS_FIELD_NUMBER: _ClassVar[int]
    file: bytes
    pixels: Pixels
    component: str
    expert: str
    board: str
    board_type: str
    ref: str
    key: str
    is_question: bool
    wants_maps: bool
    def __init__(self, file: _Optional[bytes] = ..., pixels: _Optional[_Union[Pixels, _Mapping]] = ..., component: _Optional[str] = ..., expert: _Optional[str] = ..., board: _Optional[str] = ..., board_type: _Optional[str] = ..., ref: _Optional[str] = ..., key: _Optional[str] = ..., is_question: bool = ..., wants_maps: bool = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class StreamOrder(_message.Message):
    __slots__ = ("id", "order")
    ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    id: str
    order: InspectRequest
    def __init__(self, id: _Optional[str] = ..., order: _Optional[_Union[InspectRequest, _Mapping]] = ...) -> None: ...

class StreamAnswer(_message.Message):
    __slots__ = ("id", "accepted", "judged", "refused")
    ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    id: str
    accepted: Accepted
    judged: InspectReply
    refused: Refused
    def __init__(self, id: _Optional[str] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., judged: _Optional[_Union[InspectReply, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "message", "retry_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_ms: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_ms: _Optional[int] = ...) -> None: ...

class BoundingBox(_message.Message):
    __slots__ = ("label", "score", "left", "top", "right", "bottom")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    BOTTOM_FIELD_NUMBER: _ClassVar[int]
    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float
    def __init__(self, label: _Optional[str] = ..., score: _Optional[float] = ..., left: _Optional[float] = ..., top: _Optional[float] = ..., right: _Optional[float] = ..., bottom: _Optional[float] = ...) -> None: ...

class Anomaly(_message.Message):
    __slots__ = ("expert", "score", "threshold", "map")
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    expert: str
    score: float
    threshold: float
    map: bytes
    def __init__(self, expert: _Optional[str] = ..., score: _Optional[float] = ..., threshold: _Optional[float] = ..., map: _Optional[bytes] = ...) -> None: ...

class LabelScore(_message.Message):
    __slots__ = ("label", "score", "threshold")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    label: str
    score: float
    threshold: float
    def __init__(self, label: _Optional[str] = ..., score: _Optional[float] = ..., threshold: _Optional[float] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("key", "component", "verdict", "seq", "expert", "board", "board_type", "ref", "label", "score", "reason", "experts", "boxes", "arrived_at", "finished_at", "seconds", "queue_s", "compute_s", "anomalies", "is_repeat", "outputs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    BOARD_TYPE_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    ANOMALIES_FIELD_NUMBER: _ClassVar[int]
    IS_REPEAT_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    component: str
    verdict: Verdict
    seq: int
    expert: str
    board: str
    board_type: str
    ref: str
    label: str
    score: float
    reason: str
    experts: _containers.RepeatedScalarFieldContainer[str]
    boxes: _containers.RepeatedCompositeFieldContainer[BoundingBox]
    arrived_at: _timestamp_pb2.Timestamp
    finished_at: _timestamp_pb2.Timestamp
    seconds: float
    queue_s: float
    compute_s: float
    anomalies: _containers.RepeatedCompositeFieldContainer[Anomaly]
    is_repeat: bool
    outputs: _containers.RepeatedCompositeFieldContainer[LabelScore]
    def __init__(self, key: _Optional[str] = ..., component: _Optional[str] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., seq: _Optional[int] = ..., expert: _Optional[str] = ..., board: _Optional[str] = ..., board_type: _Optional[str] = ..., ref: _Optional[str] = ..., label: _Optional[str] = ..., score: _Optional[float] = ..., reason: _Optional[str] = ..., experts: _Optional[_Iterable[str]] = ..., boxes: _Optional[_Iterable[_Union[BoundingBox, _Mapping]]] = ..., arrived_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., finished_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., seconds: _Optional[float] = ..., queue_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., anomalies: _Optional[_Iterable[_Union[Anomaly, _Mapping]]] = ..., is_repeat: bool = ..., outputs: _Optional[_Iterable[_Union[LabelScore, _Mapping]]] = ...) -> None: ...

class GetBoardRequest(_message.Message):
    __slots__ = ("serial", "board_type")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    BOARD_TYPE_FIELD_NUMBER: _ClassVar[int]
    serial: str
    board_type: str
    def __init__(self, serial: _Optional[str] = ..., board_type: _Optional[str] = ...) -> None: ...

class GetBoardReply(_message.Message):
    __slots__ = ("boards",)
    BOARDS_FIELD_NUMBER: _ClassVar[int]
    boards: _containers.RepeatedCompositeFieldContainer[Board]
    def __init__(self, boards: _Optional[_Iterable[_Union[Board, _Mapping]]] = ...) -> None: ...

class Board(_message.Message):
    __slots__ = ("serial", "board_type", "is_open", "verdict", "opened_at", "closed_at", "missing", "ok", "ng", "unknown", "parts", "is_revision", "reason")
    class MissingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    BOARD_TYPE_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    OPENED_AT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    NG_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    IS_REVISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    serial: str
    board_type: str
    is_open: bool
    verdict: Verdict
    opened_at: _timestamp_pb2.Timestamp
    closed_at: _timestamp_pb2.Timestamp
    missing: _containers.ScalarMap[str, int]
    ok: int
    ng: int
    unknown: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    is_revision: bool
    reason: str
    def __init__(self, serial: _Optional[str] = ..., board_type: _Optional[str] = ..., is_open: bool = ..., verdict: _Optional[_Union[Verdict, str]] = ..., opened_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., closed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., missing: _Optional[_Mapping[str, int]] = ..., ok: _Optional[int] = ..., ng: _Optional[int] = ..., unknown: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., is_revision: bool = ..., reason: _Optional[str] = ...) -> None: ...

class WatchResultsRequest(_message.Message):
    __slots__ = ("after_seq", "wants_maps", "after_board", "file")
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    WANTS_MAPS_FIELD_NUMBER: _ClassVar[int]
    AFTER_BOARD_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    after_seq: int
    wants_maps: bool
    after_board: int
    file: str
    def __init__(self, after_seq: _Optional[int] = ..., wants_maps: bool = ..., after_board: _Optional[int] = ..., file: _Optional[str] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("result", "board", "file", "after_seq", "after_board")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    AFTER_BOARD_FIELD_NUMBER: _ClassVar[int]
    result: Part
    board: Board
    file: str
    after_seq: int
    after_board: int
    def __init__(self, result: _Optional[_Union[Part, _Mapping]] = ..., board: _Optional[_Union[Board, _Mapping]] = ..., file: _Optional[str] = ..., after_seq: _Optional[int] = ..., after_board: _Optional[int] = ...) -> None: ...

class TriggerRequest(_message.Message):
    __slots__ = ("camera", "board", "board_type", "key")
    CAMERA_FIELD_NUMBER: _ClassVar[int]
    BOARD_FIELD_NUMBER: _ClassVar[int]
    BOARD_TYPE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    camera: str
    board: str
    board_type: str
    key: str
    def __init__(self, camera: _Optional[str] = ..., board: _Optional[str] = ..., board_type: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class TriggerReply(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("line", "version", "uptime_s", "is_draining", "requests_in_flight", "ok", "ng", "unknown", "boards_open", "switches", "loads", "evictions", "bytes_read", "queues", "pools", "sources", "standing", "alarms", "texts", "shadows", "unproven", "advice")
    class StandingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class UnprovenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    NG_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    BOARDS_OPEN_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    UNPROVEN_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    line: str
    version: str
    uptime_s: float
    is_draining: bool
    requests_in_flight: int
    ok: int
    ng: int
    unknown: int
    boards_open: int
    switches: int
    loads: int
    evictions: int
    bytes_read: int
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    standing: _containers.ScalarMap[str, str]
    alarms: _containers.RepeatedScalarFieldContainer[str]
    texts: TextCounts
    shadows: ShadowCounts
    unproven: _containers.ScalarMap[str, str]
    advice: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, line: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., is_draining: bool = ..., requests_in_flight: _Optional[int] = ..., ok: _Optional[int] = ..., ng: _Optional[int] = ..., unknown: _Optional[int] = ..., boards_open: _Optional[int] = ..., switches: _Optional[int] = ..., loads: _Optional[int] = ..., evictions: _Optional[int] = ..., bytes_read: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[Queue, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., standing: _Optional[_Mapping[str, str]] = ..., alarms: _Optional[_Iterable[str]] = ..., texts: _Optional[_Union[TextCounts, _Mapping]] = ..., shadows: _Optional[_Union[ShadowCounts, _Mapping]] = ..., unproven: _Optional[_Mapping[str, str]] = ..., advice: _Optional[_Iterable[str]] = ...) -> None: ...

class ShadowCounts(_message.Message):
    __slots__ = ("waiting", "running", "ran", "failed", "dropped")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    RAN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    ran: int
    failed: int
    dropped: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., ran: _Optional[int] = ..., failed: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class TextCounts(_message.Message):
    __slots__ = ("under_way", "ended", "read_tokens", "written_tokens", "shown", "first_token_s")
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    under_way: int
    ended: int
    read_tokens: int
    written_tokens: int
    shown: int
    first_token_s: float
    def __init__(self, under_way: _Optional[int] = ..., ended: _Optional[int] = ..., read_tokens: _Optional[int] = ..., written_tokens: _Optional[int] = ..., shown: _Optional[int] = ..., first_token_s: _Optional[float] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("executor", "processor", "requests", "running", "busy_s", "waited_s")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    executor: int
    processor: str
    requests: int
    running: str
    busy_s: float
    waited_s: float
    def __init__(self, executor: _Optional[int] = ..., processor: _Optional[str] = ..., requests: _Optional[int] = ..., running: _Optional[str] = ..., busy_s: _Optional[float] = ..., waited_s: _Optional[float] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "used_bytes", "capacity_bytes", "experts", "lease_bytes", "lease_capacity_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    used_bytes: int
    capacity_bytes: int
    experts: _containers.RepeatedScalarFieldContainer[str]
    lease_bytes: int
    lease_capacity_bytes: int
    def __init__(self, name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., experts: _Optional[_Iterable[str]] = ..., lease_bytes: _Optional[int] = ..., lease_capacity_bytes: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("name", "kind", "state", "received", "waiting", "dropped", "alarm", "left_alone")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    LEFT_ALONE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    state: str
    received: int
    waiting: int
    dropped: int
    alarm: str
    left_alone: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ..., received: _Optional[int] = ..., waiting: _Optional[int] = ..., dropped: _Optional[int] = ..., alarm: _Optional[str] = ..., left_alone: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("subject",)
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    def __init__(self, subject: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("sentences",)
    SENTENCES_FIELD_NUMBER: _ClassVar[int]
    sentences: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sentences: _Optional[_Iterable[str]] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadReply(_message.Message):
    __slots__ = ("is_applied", "problems", "added", "replaced", "removed", "needs_restart")
    IS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NEEDS_RESTART_FIELD_NUMBER: _ClassVar[int]
    is_applied: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    added: _containers.RepeatedScalarFieldContainer[str]
    replaced: _containers.RepeatedScalarFieldContainer[str]
    removed: _containers.RepeatedScalarFieldContainer[str]
    needs_restart: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, is_applied: bool = ..., problems: _Optional[_Iterable[str]] = ..., added: _Optional[_Iterable[str]] = ..., replaced: _Optional[_Iterable[str]] = ..., removed: _Optional[_Iterable[str]] = ..., needs_restart: _Optional[_Iterable[str]] = ...) -> None: ...
