"""Client of a running agent, for the command line: blocking calls, with the desk's values as answers.

Guarantees: a refused call raises OrderRefused with its reason; a call that does not reach the agent raises
AgentUnreachable, with what to check.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from agent.doors.grpc.messages import part_of, status_of
from agent.doors.grpc.refusals import PUSHBACK_MS, REASON
from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from agent.faults.errors import AgentUnreachable, OrderRefused, Reason
from agent.line_file.api import UNIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agent.doors.desk import StatusView, VerdictView

MESSAGE_BYTES = 64 * 2**20
AT_ONCE = 16  # images sent before the first answer
ANSWER_S = 60.0  # timeout of a query
INSPECT_S = 600.0  # timeout of one image's verdict, including its wait
TRIES = 100  # of an image refused for lack of room

Call = Any  # gRPC has no types


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials for HOST:PORT, as PEM texts; ``authority`` None: unencrypted; empty: the system's authorities."""

    token: str | None = None
    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None


class AgentClient:
    """Connection to an agent; close it, or use it as a context."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        self.address = address
        access = Access() if access is None or address.startswith(UNIX) else access
        options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", MESSAGE_BYTES))
        if access.authority is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            credentials = grpc.ssl_channel_credentials(access.authority or None, access.key, access.certificate)
            self._channel = grpc.secure_channel(address, credentials, options)
        self._agent = inspection_pb2_grpc.InspectionStub(self._channel)
        self._metadata = () if access.token is None else (("authorization", f"Bearer {access.token}"),)

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def inspect(self, images: Iterable[bytes], component: str, *, with_maps: bool = False) -> Iterator[VerdictView]:
        """Verdict of each image, in order; not stored. An image refused for lack of room is sent again.

        Raises OrderRefused for an image refused otherwise.
        """
        under_way: deque[tuple[pb.InspectRequest, Call]] = deque()
        for image in images:
            request = pb.InspectRequest(file=image, component=component, is_question=True, wants_maps=with_maps)
            under_way.append((request, self._sent(request)))
            if len(under_way) == AT_ONCE:
                yield self._judged(*under_way.popleft())
        while under_way:
            yield self._judged(*under_way.popleft())

    def status(self) -> StatusView:
        with self._explained():
            return status_of(self._agent.Status(pb.StatusRequest(), timeout=ANSWER_S, metadata=self._metadata))

    def explain(self, subject: str) -> list[str]:
        """Sentences. Raises OrderRefused for an unknown subject."""
        with self._explained():
            request = pb.ExplainRequest(subject=subject)
            return list(self._agent.Explain(request, timeout=ANSWER_S, metadata=self._metadata).sentences)

    def _sent(self, request: pb.InspectRequest) -> Call:
        return self._agent.Inspect.future(request, timeout=INSPECT_S, metadata=self._metadata)

    def _judged(self, request: pb.InspectRequest, sent: Call) -> VerdictView:
        for _ in range(TRIES):
            try:
                with self._explained():
                    return part_of(sent.result().parts[0])
            except OrderRefused as refused:
                if refused.reason is not Reason.QUEUE_FULL:
                    raise
                time.sleep(refused.retry_s or 1.0)
                sent = self._sent(request)
        raise OrderRefused(Reason.QUEUE_FULL, f"{self.address}: there was no room for an image in {TRIES} tries")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._error(error) from error

    def _error(self, error: Call) -> OrderRefused | AgentUnreachable:
        metadata = dict(error.trailing_metadata() or ())
        reason = metadata.get(REASON)
        if reason is not None and reason in Reason.__members__:
            pushback_ms = metadata.get(PUSHBACK_MS)
            return OrderRefused(Reason(reason), str(error.details()), pushback_ms and int(pushback_ms) / 1000)
        details = str(error.details())
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            why = "another program answers there, not an agent - is this one of its addresses?"
        elif error.code() is not grpc.StatusCode.UNAVAILABLE:
            why = f"{error.code().name}: {details}"
        elif os.strerror(errno.EACCES) in details:
            advice = "run this as the agent's user (`sudo -u`), or add a socket to `api.grpc` that your group may open"
            why = f"this user may not open the socket - {advice}"
        else:
            advice = "is the agent running (`coserve serve`), and is this one of its addresses (`api.grpc`)?"
            why = f"no answer - {advice} ({details})"
        return AgentUnreachable(self.address, why)
