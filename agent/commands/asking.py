"""Commands that ask a running agent instead of doing the work themselves; no model is loaded here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.api.calls.desk import Part
from agent.api.client import Access, AgentClient
from agent.config import read_secret
from agent.line_file.api import UNIX
from experts.errors import ConfigError
from experts.expert import Anomaly, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from agent.api.calls.desk import StatusView, TextOrder
    from agent.api.calls.texts import Told
    from agent.commands.judged_pictures import Shown
    from agent.config import LineConfig


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """Files given on the command line for HOST:PORT; None: the line file's."""

    authority: Path | None = None
    token: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def ask_status(config: LineConfig | None, target: str | None, files: AccessFiles) -> StatusView:
    """Status of the agent at ``target``, or at the line's first address. Raises as ``ask_to_write``."""
    with _client(config, target, files) as client:
        return client.status()


def ask_to_inspect(
    config: LineConfig,
    target: str,
    files: AccessFiles,
    images: Sequence[Path],
    component: str,
    progress: Callable[[str, int, int], None],
    pictures: Path | None = None,
) -> list[dict[str, Any]]:
    """One row per image, in order, as ``inspect_images`` has them; a file that cannot be read is UNKNOWN. ``pictures``:
    folder to draw each image in. Raises as ``ask_to_write``."""
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

    with _client(config, target, files) as client:
        parts = []
        for part in client.inspect(contents(), component, with_maps=pictures is not None):
            parts.append(part)
            progress("inspect", len(parts) + len(unreadable), len(images))
    judged = iter(parts)
    ends = [None if number in unreadable else next(judged) for number in range(len(images))]
    rows = [
        _row(image, component, end or Part("", component, Verdict.UNKNOWN, reason=unreadable[number]))
        for number, (image, end) in enumerate(zip(images, ends, strict=True))
    ]
    return rows if pictures is None else _with_pictures(rows, images, ends, pictures)


def _with_pictures(
    rows: Sequence[dict[str, Any]], images: Sequence[Path], ends: Sequence[Part | None], folder: Path
) -> list[dict[str, Any]]:
    from agent.commands.judged_pictures import draw_judged

    read = [(image, _shown(end)) for image, end in zip(images, ends, strict=True) if end is not None]
    drawn = iter(draw_judged([image for image, _ in read], [shown for _, shown in read], folder))
    files = [None if end is None else next(drawn) for end in ends]
    return [row | {"picture": None if file is None else str(file)} for row, file in zip(rows, files, strict=True)]


def _shown(part: Part) -> Shown:
    from agent.commands.judged_pictures import Shown
    from experts.map_pictures import map_of

    anomalies = tuple(
        Anomaly(each.score, each.threshold, None if each.map_png is None else map_of(each.map_png))
        for each in part.anomalies
    )
    return Shown(part.verdict, part.label, part.score, part.reason, part.boxes, anomalies, part.outputs)


def ask_to_write(config: LineConfig | None, target: str | None, files: AccessFiles, order: TextOrder) -> Iterator[Told]:
    """Pieces of a text as the agent writes them, then its end; closing the iterator cancels it. ``target`` None: the
    line's first address. Raises ConfigError, AgentUnreachable and OrderRefused."""
    with _client(config, target, files) as client:
        yield from client.generate(order)


def _client(config: LineConfig | None, target: str | None, files: AccessFiles) -> AgentClient:
    if not target:
        if config is None or not config.api.grpc:
            raise ConfigError("the line file has no address of an agent - add api: {grpc: ...} to it, or name --target")
        target = config.api.grpc[0]
    return AgentClient(target, Access() if target.startswith(UNIX) else _access(config, files))


def _access(config: LineConfig | None, files: AccessFiles) -> Access:
    api = config and config.api
    authority = files.authority or (api and api.tls and api.tls.certificate)
    token = read_secret(api.token) if api and api.token and not files.token else None
    if files.token:
        token = _bytes(files.token).decode("utf-8", "replace").rstrip("\r\n")
    return Access(
        token=token,
        authority=_bytes(authority) if authority else None,
        certificate=_bytes(files.certificate) if files.certificate else None,
        key=_bytes(files.key) if files.key else None,
    )


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror} - name a file that can be read") from error


def _row(image: Path, component: str, part: Part) -> dict[str, Any]:
    return {
        "image": str(image),
        "component": component,
        "verdict": str(part.verdict),
        "label": part.label,
        "score": part.score,
        "experts": list(part.experts),
        "seconds": round(part.seconds, 6),
        "reason": part.reason,
        "boxes": [box.as_json() for box in part.boxes],
        "anomalies": [
            {"expert": each.expert, "score": each.score, "threshold": each.threshold} for each in part.anomalies
        ],
        "outputs": [output.as_json() for output in part.outputs],
    }
