"""Requests to a running agent: status, explain, trace, inspect with --target, generate. No model is loaded here.

Guarantees: a model's text cannot act on a terminal: control characters are shown escaped.
"""

from __future__ import annotations

import socket
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agent.doors.grpc.client import Access, AgentClient
from agent.environment import read_secret
from agent.faults.errors import AgentUnreachable
from agent.line_file.api import UNIX, host_and_port
from experts.errors import ConfigError
from experts.filesystem import whole_file
from experts.llm.serving.generation import Ending

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from agent.config import LineConfig
    from agent.doors.desk import StatusView, VerdictView
    from agent.doors.http.client import WebClient


KEPT = frozenset("\n\t")
KNOCK_S = 2.0  # arbitrary: a connection, not an answer
THINK, THOUGHT_OVER = "<think>", "</think>"
ENDINGS = {
    Ending.STOP: "the model ended the text",
    Ending.LENGTH: "the length limit was reached",
    Ending.DEADLINE: "the deadline passed",
}


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """Address of an agent, and files for HOST:PORT, from the command line; None: the line file's."""

    target: str | None = None
    authority: Path | None = None
    token: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def ask_status(config: LineConfig | None, access: AgentAccess) -> StatusView:
    with _client(config, access) as client:
        return client.status()


def ask_explanation(config: LineConfig | None, access: AgentAccess, subject: str) -> list[str]:
    with _client(config, access) as client:
        return client.explain(subject)


def write_trace(config: LineConfig | None, access: AgentAccess, last_s: int, out: Path) -> int:
    """Write the agent's trace; returns its size. Raises also ConfigError for a file that cannot be written."""
    content = web_client(config, access).content("GET", f"/api/trace?last={last_s}")
    try:
        with whole_file(out) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror} - name a file that can be written with --out") from error
    return len(content)


def ask_to_inspect(
    config: LineConfig,
    access: AgentAccess,
    images: Sequence[Path],
    component: str,
    progress: Callable[[str, int, int], None],
    pictures: Path | None = None,
) -> list[dict[str, Any]]:
    """One row per image, in order, as of ``inspect_images``; an unreadable file is UNKNOWN. ``pictures``: folder to
    draw each image in. Raises as ``generated``."""
    from agent.commands.judged_images import judged_rows, unjudged  # loads Pillow

    unreadable: dict[int, str] = {}

    def contents() -> Iterator[bytes]:
        for number, image in enumerate(images):
            try:
                content = image.read_bytes()
            except OSError as error:
                unreadable[number] = f"{image}: {error.strerror}"
                continue
            if content:
                yield content
            else:
                unreadable[number] = f"{image}: the file is empty"

    with _client(config, access) as client:
        parts: list[VerdictView] = []
        for part in client.inspect(contents(), component, with_maps=pictures is not None):
            parts.append(part)
            progress("inspect", len(parts) + len(unreadable), len(images))
    answers = iter(parts)
    judged = [
        unjudged(image, unreadable[number]) if number in unreadable else next(answers)
        for number, image in enumerate(images)
    ]
    return judged_rows(images, component, judged, pictures)


Messages = tuple[dict[str, str], ...]


def chat_messages(words: str, system: str | None) -> Messages:
    opening = [("system", system)] if system is not None else []
    return tuple({"role": role, "content": content} for role, content in (*opening, ("user", words)))


def text_call(
    model: str, text: str | Messages, most_tokens: int | None, deadline_s: float | None, stop: tuple[str, ...],
    sampling: dict[str, Any],
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Path and body of a call for the continuation of a prompt, or for the answer to messages."""
    path, asked = ("/v1/completions", "prompt") if isinstance(text, str) else ("/v1/chat/completions", "messages")
    given = {"max_tokens": most_tokens, "stop": list(stop) or None, **sampling}
    ours = {} if deadline_s is None else {"deadline_s": deadline_s}
    body = {name: value for name, value in given.items() if value is not None}
    return path, {"model": model, asked: text, "stream": True, "coserve": ours, **body}


def generated(
    config: LineConfig | None, access: AgentAccess, call: tuple[str, dict[str, Any]], show: Callable[[str], None]
) -> dict[str, Any]:
    """End and whole text; ``show`` gets each piece as it comes. Raises ConfigError, AgentUnreachable, OrderRefused."""
    text, row, is_thought = "", dict[str, Any](), False
    for event in web_client(config, access).events(*call):
        row |= event.get("coserve", {})
        for choice in event["choices"]:
            part = choice.get("delta", choice)
            thought, piece = part.get("reasoning_content"), part.get("text") or part.get("content") or ""
            if thought:
                piece = thought if is_thought else f"{THINK}{thought}"
            elif piece and is_thought:
                piece = f"{THOUGHT_OVER}\n{piece}"
            is_thought = bool(thought) or (is_thought and not piece)
            text += piece
            show(piece)
    rounded = {name: row[name] and round(row[name], 6) for name in ("seconds", "queue_s", "first_token_s")}
    return {"text": text, **row, **rounded}


def for_terminal(text: str) -> str:
    """The text with control characters escaped, which would act on a terminal."""
    return "".join(each if each.isprintable() or each in KEPT else f"\\x{ord(each):02x}" for each in text)


def closing_line(row: dict[str, Any]) -> str:
    rate = row["written_tokens"] / row["seconds"] if row["seconds"] else 0.0
    why = "the text ended" if row["ending"] is None else ENDINGS[Ending(row["ending"])]
    return (
        f"{row['expert']}: {row['read_tokens']} tokens read, {row['written_tokens']} written in "
        f"{row['seconds']:.2f} s ({rate:.1f}/s); {why}"
    )


def web_client(config: LineConfig | None, access: AgentAccess) -> WebClient:
    """Client of the line's HTTP address that is open, or of the target."""
    from agent.doors.http.client import HttpAccess, WebClient

    target = _target(config, access, "http")
    if target.startswith(UNIX):  # where only callers of its group need a token
        return WebClient(target, HttpAccess(_token(access.token)))
    given = _access(config, access)
    return WebClient(target, HttpAccess(given.token, None if given.authority is None else _context(access, given)))


def _context(files: AgentAccess, given: Access) -> ssl.SSLContext:
    import ssl

    try:
        authority = None if not given.authority else given.authority.decode("ascii", "replace")
        context = ssl.create_default_context(cadata=authority)
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"--ca, --certificate or --key: {error.reason} - name files in PEM") from error
    return context


def _client(config: LineConfig | None, access: AgentAccess) -> AgentClient:
    target = _target(config, access, "grpc")
    return AgentClient(target, Access() if target.startswith(UNIX) else _access(config, access))


def _target(config: LineConfig | None, access: AgentAccess, wire: Literal["grpc", "http"]) -> str:
    addresses: Sequence[str] = () if config is None else getattr(config.api, wire)
    if not access.target and not addresses:
        raise ConfigError(f"the line file has no address of an agent - add api: {{{wire}: ...}}, or use --target")
    if access.target and not access.target.startswith(UNIX):
        try:
            return host_and_port(access.target)
        except ValueError as error:
            raise ConfigError(f"--target: {error}") from None
    return access.target or _open_door(addresses)


def _open_door(addresses: Sequence[str]) -> str:
    """The address that is served, a unix socket first. Raises AgentUnreachable if none of several is."""
    if len(addresses) == 1:
        return addresses[0]
    for address in sorted(addresses, key=lambda each: not each.startswith(UNIX)):
        with suppress(OSError):
            _knock(address)
            return address
    why = "no answer at any of them - is the agent running (`coserve serve`), and may this user open its sockets?"
    raise AgentUnreachable(", ".join(addresses), why)


def _knock(address: str) -> None:
    """Raises OSError where nobody answers."""
    if address.startswith(UNIX):
        with closing(socket.socket(socket.AF_UNIX)) as door:
            door.settimeout(KNOCK_S)
            door.connect(address.removeprefix(UNIX))
        return
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


def _access(config: LineConfig | None, files: AgentAccess) -> Access:
    api = None if config is None else config.api
    authority = files.authority or (None if api is None or api.tls is None else api.tls.certificate)
    token = read_secret(api.token) if api and api.token and not files.token else _token(files.token)
    return Access(
        token=token, authority=_bytes(authority), certificate=_bytes(files.certificate), key=_bytes(files.key)
    )


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    token = (_bytes(file) or b"").decode("utf-8", "replace").rstrip("\r\n")
    if not (token and token.isascii() and token.isprintable()):  # HTTP sends no other
        raise ConfigError(f"{file}: is no token - name a file that holds one line of printable ASCII alone")
    return token


def _bytes(file: Path | None) -> bytes | None:
    try:
        return file.read_bytes() if file else None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror} - name a file that can be read") from error
