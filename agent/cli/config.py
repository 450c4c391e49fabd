"""`coserve config show`, `check`, `schema` and `openapi`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import CONFIGURATION, FAILED, explained, say
from experts.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.config import LineConfig

PROBE_S = 15.0
SHOWN_WIDTH = 72

config_app = typer.Typer(help="Line files: check one, print their schema.", no_args_is_help=True)


@config_app.command("show")
def show_config(
    line: LineFile,
    resolved: Annotated[bool, typer.Option("--resolved", help="every key, defaults included")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the keys in effect, and their origin: the file's line, a variable, or the default."""
    from agent.config import resolved_keys

    with explained():
        keys = [key for key in resolved_keys(line) if resolved or key.origin != "default"]
    texts = [f"{key.key}: {_text(key.value)}" for key in keys]
    width = min(max(map(len, texts), default=0), SHOWN_WIDTH)
    lines = [f"{text:<{width}}  # {key.origin}" for text, key in zip(texts, keys, strict=True)]
    say(as_json, {"keys": [asdict(key) for key in keys]}, lines)


@config_app.command("check")
def check_config(
    line: LineFile,
    probe: Annotated[bool, typer.Option("--probe", help="also read a frame from each camera")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a line file as ``serve`` reads it; every mistake with file, line and key."""
    from agent.lines.line_check import checked_line
    from experts.document import read_document

    try:
        config = checked_line(read_document(line.absolute()))
    except ConfigError as error:
        _refuse(as_json, [_problem(each) for each in error.problems], str(error), CONFIGURATION)
    with explained():
        silent = list(_silent_cameras(config)) if probe else []
    if silent:
        _refuse(as_json, [{"message": text} for text in silent], "\n".join(silent), FAILED)
    experts, routes = len(config.catalog.experts), len(config.catalog.components) + len(config.catalog.texts)
    text = f"{line}: line {config.line!r}, {experts} experts, {routes} routes: no mistake found"
    from agent.commands.proving import text_of_unproven, unproven_line

    unproven = text_of_unproven(config, lacks := unproven_line(config))
    promotions = [each.text for each in config.promotions]
    row = {"ok": True, "line": config.line, "experts": experts, "routes": routes, "problems": []}
    row |= {"promotions": promotions, "unproven": {name: lack.why for name, lack in lacks.items()}}
    say(as_json, row, [text, *promotions])
    if unproven is not None and not as_json:
        sys.stderr.write(f"warning: {unproven} - `coserve experts verify {line}` proves them\n")


@config_app.command("schema")
def config_schema(as_json: AsJson = False) -> None:
    """Print the JSON Schema of a line file, for editors; usable offline. (``--json`` has no effect: it is JSON.)"""
    from agent.config import json_schema

    print(json.dumps(json_schema(), indent=None if as_json else 2))


@config_app.command("openapi")
def config_openapi(as_json: AsJson = False) -> None:
    """Print the OpenAPI document of the agent's HTTP door: `/api` and `/v1`; usable offline, and always JSON."""
    from importlib.metadata import version

    from agent.doors.http.openapi import document
    from agent.doors.http.texts import described
    from agent.service.station.served import OPERATIONS

    openapi = document((*OPERATIONS, *described.OPERATIONS), version("coserve"))
    print(json.dumps(openapi, indent=None if as_json else 2))


def _text(value: object) -> str:
    is_json = isinstance(value, bool | int | float | list | tuple | None)
    return json.dumps(value, default=str) if is_json else str(value)


def _refuse(as_json: bool, problems: list[dict[str, Any]], text: str, code: int) -> NoReturn:
    if as_json:
        print(json.dumps({"ok": False, "problems": problems}))
    else:
        sys.stderr.write(f"{text}\n")
    raise typer.Exit(code)


def _problem(error: ConfigError) -> dict[str, Any]:
    place = error.place
    return {
        "file": str(place.file) if place else None,
        "line": place.line if place else None,
        "column": place.column if place else None,
        "key": place.key if place else None,
        "message": error.message,
    }


def _silent_cameras(config: LineConfig) -> Iterator[str]:
    """Cameras without a frame in time, with the fault. Raises SecretMissing."""
    from agent.environment import read_secret
    from agent.sources.cameras.process import probe

    for camera in config.intake.cameras:
        password = None if camera.password is None else read_secret(camera.password)
        if (fault := probe(camera, password, PROBE_S)) is not None:
            yield f"camera {camera.name}: {fault}"
