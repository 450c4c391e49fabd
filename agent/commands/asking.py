"""Requests to a running agent: status, explain, inspect with --target, generate. No model is loaded here.

Guarantees: a model's text cannot act on a terminal: control characters are shown escaped.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from agent.api.calls.desk import TextEnd, TextOrder
from agent.api.client import Access, AgentClient
from agent.config import read_secret
from agent.line_file.api import UNIX
from experts.errors import ConfigError, GenerationInvalid, OrderRefused, Refusing
from experts.expert import Anomaly, Verdict
from experts.llm.serving.generation import Ending, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from agent.api.calls.desk import AnomalyView, StatusView, VerdictView
    from agent.config import LineConfig


KEPT = frozenset("\n\t")
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
    from agent.commands.judged_images import JudgedImage, judged_rows  # loads Pillow

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
    judged = []
    for number in range(len(images)):
        if number in unreadable:
            judged.append(JudgedImage(Verdict.UNKNOWN, reason=unreadable[number]))
            continue
        part = next(answers)
        judged.append(
            JudgedImage(
                part.verdict, part.label, part.score, part.reason, part.experts, part.seconds, part.boxes,
                tuple((each.expert, _measured(each)) for each in part.anomalies), part.outputs,
            )
        )  # fmt: skip
    return judged_rows(images, component, judged, pictures)


def _measured(anomaly: AnomalyView) -> Anomaly:
    from experts.thresholds.map_pictures import map_of

    return Anomaly(anomaly.score, anomaly.threshold, None if anomaly.map_png is None else map_of(anomaly.map_png))


Messages = tuple[dict[str, str], ...]


def chat_messages(words: str, system: str | None) -> Messages:
    opening = [("system", system)] if system is not None else []
    return tuple({"role": role, "content": content} for role, content in (*opening, ("user", words)))


def order_for(
    model: str, text: str | Messages, most_tokens: int | None, deadline_s: float | None, stop: tuple[str, ...],
    sampling: dict[str, Any],
) -> TextOrder:  # fmt: skip
    """Order for the continuation of a prompt, or for the answer to messages. Raises OrderRefused."""
    try:
        given = frozenset(name for name, value in sampling.items() if value is not None)
        drawn = Sampling(**{name: value for name, value in sampling.items() if value is not None})
    except GenerationInvalid as error:
        raise OrderRefused(Refusing.INVALID, str(error), field=error.field) from error
    prompt, messages = (text, ()) if isinstance(text, str) else (None, text)
    return TextOrder(model, prompt, messages, most_tokens, drawn, stop, deadline_s, given)


def generated(
    config: LineConfig | None, access: AgentAccess, order: TextOrder, show: Callable[[str], None]
) -> dict[str, Any]:
    """End and whole text; ``show`` gets each piece as it comes. Raises ConfigError, AgentUnreachable, OrderRefused."""
    text = ""
    with _client(config, access) as client:
        for part in client.generate(order):
            if isinstance(part, TextEnd):
                return _text_row(text, part)
            text += part.text
            show(part.text)
    raise OrderRefused(Refusing.NOT_NOW, "the agent stopped in the middle of the text - try again")


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


def _text_row(text: str, end: TextEnd) -> dict[str, Any]:
    row = {"text": text, **asdict(replace(end, failure=None)), "ending": end.ending and str(end.ending)}
    del row["failure"]
    for name in ("seconds", "queue_s", "first_token_s"):
        row[name] = None if row[name] is None else round(row[name], 6)
    return row


def _client(config: LineConfig | None, access: AgentAccess) -> AgentClient:
    target = access.target
    if not target:
        if config is None or not config.api.grpc:
            raise ConfigError("the line file has no address of an agent - add api: {grpc: ...}, or use --target")
        target = config.api.grpc[0]
    return AgentClient(target, Access() if target.startswith(UNIX) else _access(config, access))


def _access(config: LineConfig | None, files: AgentAccess) -> Access:
    api = None if config is None else config.api
    authority = files.authority or (None if api is None or api.tls is None else api.tls.certificate)
    token = read_secret(api.token) if api and api.token and not files.token else None
    if given := _bytes(files.token):
        token = given.decode("utf-8", "replace").rstrip("\r\n")
    return Access(
        token=token, authority=_bytes(authority), certificate=_bytes(files.certificate), key=_bytes(files.key)
    )


def _bytes(file: Path | None) -> bytes | None:
    try:
        return file.read_bytes() if file else None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror} - name a file that can be read") from error
