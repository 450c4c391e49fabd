"""HTTP client of a running agent, for the command line: blocking calls over a unix socket or HOST:PORT.

Guarantees: a refused call raises OrderRefused with its reason; a call that does not reach the agent raises
AgentUnreachable, with what to check. A stream that ends in the middle is an error, never a whole answer.
"""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import TYPE_CHECKING, Any

from agent.doors.http.routes import STATUS
from agent.faults.errors import AgentUnreachable, OrderRefused, Reason
from agent.line_file.api import UNIX

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

ANSWER_S = 60.0
EVENT, DONE = b"data: ", b"[DONE]"
OTHERWISE = " (--token-file FILE), or ask the agent's unix socket as its user (--target unix:PATH)"
CUT_OFF = "the agent stopped in the middle of its answer - try again"


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Credentials for HOST:PORT; ``tls`` None: unencrypted."""

    token: str | None = None
    tls: ssl.SSLContext | None = None


class WebClient:
    """Each call has a connection of its own."""

    def __init__(self, address: str, access: HttpAccess | None = None) -> None:
        self.address = address
        self._access = access or HttpAccess()

    def call(self, method: str, path: str, values: Any = None, timeout_s: float = ANSWER_S) -> Any:  # noqa: ANN401
        """Answer of JSON, parsed; None for an empty one."""
        body = self.content(method, path, values, timeout_s)
        return json.loads(body) if body else None

    def content(self, method: str, path: str, values: Any = None, timeout_s: float = ANSWER_S) -> bytes:  # noqa: ANN401
        with self._answered(method, path, values, timeout_s) as answer:
            return answer.read()

    def events(self, path: str, values: Any) -> Iterator[Any]:  # noqa: ANN401  # JSON
        """Events of a stream as they come; closing the iterator closes the connection, which cancels the answer."""
        with self._answered("POST", path, values, None) as answer:
            for line in answer:
                content = line.removeprefix(EVENT).strip()
                if content == DONE:
                    return
                if content:
                    event = json.loads(content)
                    if "error" in event:
                        raise _refused(503, event["error"])
                    yield event
        raise OrderRefused(Reason.NOT_NOW, CUT_OFF)

    @contextmanager
    def _answered(self, method: str, path: str, values: Any, timeout_s: float | None) -> Iterator[HTTPResponse]:  # noqa: ANN401
        connection = self._connection(timeout_s)
        headers = {} if self._access.token is None else {"authorization": f"Bearer {self._access.token}"}
        body = None
        if values is not None:
            body, headers["content-type"] = json.dumps(values).encode(), "application/json"
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise _refused(answer.status, _error_in(answer.read()))
            yield answer
        except IncompleteRead:
            raise OrderRefused(Reason.NOT_NOW, CUT_OFF) from None
        except PermissionError:
            advice = "run this as the agent's user (`sudo -u`), or add a socket to `api.http` that your group may open"
            raise AgentUnreachable(self.address, f"this user may not open the socket - {advice}") from None
        except HTTPException as error:
            why = (
                f"another program answers there, not an agent - is this one of its addresses (`api.http`)? ({error!r})"
            )
            raise AgentUnreachable(self.address, why) from error
        except OSError as error:
            advice = "is the agent running (`coserve serve`), and is this one of its addresses (`api.http`)?"
            raise AgentUnreachable(self.address, f"no answer - {advice} ({error})") from error
        finally:
            connection.close()

    def _connection(self, timeout_s: float | None) -> HTTPConnection:
        if self.address.startswith(UNIX):
            return _UnixConnection(self.address.removeprefix(UNIX), timeout_s)
        host, _, port = self.address.rpartition(":")
        if self._access.tls is None:
            return HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
        return HTTPSConnection(host.strip("[]"), int(port), timeout=timeout_s, context=self._access.tls)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _error_in(body: bytes) -> dict[str, Any]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        error = body.decode("utf-8", "replace").strip()
    return error if isinstance(error, dict) else {"message": error}


def _refused(status: int, error: dict[str, Any]) -> OrderRefused:
    """Refusal in our own form, or in OpenAI's."""
    code = str(error.get("reason") or error.get("code") or "").upper()
    by_status = next((reason for reason, known in STATUS.items() if known == status), Reason.NOT_NOW)
    reason = Reason(code) if code in Reason.__members__ else by_status
    remedy = OTHERWISE if reason is Reason.UNAUTHENTICATED else ""
    return OrderRefused(reason, f"{error.get('message')}{remedy}", field=error.get("field") or error.get("param"))
