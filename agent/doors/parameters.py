"""Parameters of an infer call, by one rule over both wires: those of the call and of its input tensors are one set.

Guarantees: a parameter that is not known is refused by name. A call that names a board, a type, a ref or a key is an
inspection, or is refused with the reason: it is never a question in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.faults.errors import OrderRefused, Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from agent.doors.proto import inference_pb2 as pb

    Parameters = Mapping[str, pb.InferParameter]

BOARD, REF, BOARD_TYPE, KEY = "board", "ref", "board_type", "key"
OF_INSPECTION = {BOARD: BOARD, "board_serial": BOARD, BOARD_TYPE: BOARD_TYPE, REF: REF, KEY: KEY}
CONTENT_TYPE, BASE64 = "content_type", "base64"
CONTENT_TYPES = (BASE64, "np", "pd", "str")  # of MLServer's codecs; the others' bytes are as they are sent
# What clients of Triton, KServe and MLServer send by themselves. It changes no verdict: each image is judged alone.
OF_CALL = (
    CONTENT_TYPE, "binary_data_output", "headers", "priority", "sequence_id", "sequence_start", "sequence_end",
    "timeout",
)  # fmt: skip
OF_TENSOR, OF_OUTPUT = (CONTENT_TYPE, "binary_data_size", "headers"), ("binary_data", CONTENT_TYPE)
OF_TRITON = "triton_"  # begins with
UNREAD = (
    "if the scanner read nothing, scan again; a question, which is not stored, names no board, board_type, ref or key"
)


def invalid(message: str) -> OrderRefused:
    return OrderRefused(Reason.INVALID, message)


def of_inspection(request: pb.ModelInferRequest) -> dict[str, str]:
    """Names of an inspection in the call, by OF_INSPECTION's values. Raises OrderRefused."""
    found: dict[str, str] = {}
    for tensor, name, given in _given(request):
        value, ours = _text(name, given), OF_INSPECTION[name]
        if found.setdefault(ours, value) != value:
            there = f" with {tensor}" if tensor else ""
            raise invalid(f"{name} is {value[:100]!r}{there}, and {found[ours][:100]!r} besides - send it once")
    return found


def check_named(boards: Collection[str | None], named: Collection[str]) -> None:
    """Raises OrderRefused for what is named of an inspection, without a board."""
    if None in boards and named:
        raise invalid(f"{', '.join(named)} without a board: only an inspection has them - send board; {UNREAD}")


def checked(name: str, value: str) -> str:
    """Raises OrderRefused for nothing but blanks."""
    if not value.strip():
        raise invalid(f"{name} is empty: {UNREAD}")
    return value


def check_known(parameters: Parameters, known: Collection[str], of_whom: str) -> None:
    """Raises OrderRefused for a parameter that is neither known nor of Triton's own."""
    unknown = next((name for name in parameters if name not in known and not name.startswith(OF_TRITON)), None)
    if unknown is not None:
        raise invalid(f"no parameter {of_whom} is called {unknown[:100]!r} - they are {', '.join(known)}")


def content_type(own: Parameters, of_call: Parameters) -> str | None:
    """Content type of a tensor: its own, or the call's. Raises OrderRefused for an unknown one."""
    given = own.get(CONTENT_TYPE) or of_call.get(CONTENT_TYPE)
    if given is not None and given.string_param not in CONTENT_TYPES:
        raise invalid(f"{CONTENT_TYPE} is {given.string_param[:40]!r}, where {', '.join(CONTENT_TYPES)} are read")
    return None if given is None else given.string_param


def _given(request: pb.ModelInferRequest) -> Iterator[tuple[str, str, pb.InferParameter]]:
    """Parameters of an inspection: tensor or "", name, value. Raises OrderRefused for unknown ones."""
    places = [("", request.parameters, OF_CALL), *((each.name, each.parameters, OF_TENSOR) for each in request.inputs)]
    for tensor, parameters, others in places:
        of_whom = f"of the input {tensor[:100]}" if tensor else "of the call"
        check_known(parameters, (*OF_INSPECTION, *others), of_whom)
        content_type(parameters, {})
        yield from ((tensor, name, parameters[name]) for name in OF_INSPECTION if name in parameters)


def _text(name: str, given: pb.InferParameter) -> str:
    kind = given.WhichOneof("parameter_choice")
    if kind != "string_param":
        what = "true or false" if kind == "bool_param" else "not set" if kind is None else "a number"
        raise invalid(f"{name} is {what}, and must be a text: as a number a serial would lose its leading zeros")
    return checked(name, given.string_param)
