"""`coserve config show`, `check` and `schema`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from agent.cli.arguments import AsJson, LineFile
from agent.cli.endings import CONFIGURATION, FAILED, explained, say
from experts.errors import ConfigError


def show_config(
    line: LineFile,
    resolved: Annotated[bool, typer.Option("--resolved", help="every key, defaults included")] = False,
    as_json: AsJson = False,
) -> None:
    """Keys that take effect, and their origin: the file's line, a variable, or the default."""
    from agent.commands.configuration import shown_lines, shown_rows
    from agent.config import resolved_keys

    with explained():
        keys = [key for key in resolved_keys(line) if resolved or key.origin != "default"]
    say(as_json, {"keys": shown_rows(keys)}, shown_lines(keys))


def check_config(
    line: LineFile,
    probe: Annotated[bool, typer.Option("--probe", help="also ask each camera for a frame")] = False,
    as_json: AsJson = False,
) -> None:
    """Read a line file as ``serve`` would; every mistake with file, line and key."""
    from agent.commands.configuration import silent_cameras, weights_problems
    from agent.config import read_line

    try:
        config = read_line(line)
        if problems := list(weights_problems(config)):
            raise ConfigError.of(problems)
    except ConfigError as error:
        if not as_json:
            sys.stderr.write(f"{error}\n")
        else:
            print(json.dumps({"ok": False, "problems": [_problem(each) for each in error.problems]}))
        raise typer.Exit(CONFIGURATION) from error
    with explained():
        silent = list(silent_cameras(config)) if probe else []
    if silent:
        if as_json:
            print(json.dumps({"ok": False, "problems": [{"message": text} for text in silent]}))
        else:
            sys.stderr.write("".join(f"{text}\n" for text in silent))
        raise typer.Exit(FAILED)
    experts, routes = len(config.catalog.experts), len(config.catalog.components) + len(config.catalog.texts)
    text = f"{line}: line {config.line!r}, {experts} experts, {routes} routes: no mistake found"
    say(as_json, {"ok": True, "line": config.line, "experts": experts, "routes": routes, "problems": []}, [text])


def config_schema(as_json: AsJson = False) -> None:
    """The JSON Schema of a line file, for editors; usable offline. (``--json`` changes nothing: it is JSON anyway.)"""
    from agent.config import json_schema

    print(json.dumps(json_schema(), indent=None if as_json else 2))


def _problem(error: ConfigError) -> dict[str, Any]:
    place = error.place
    return {
        "file": str(place.file) if place else None,
        "line": place.line if place else None,
        "column": place.column if place else None,
        "key": place.key if place else None,
        "message": error.message,
    }
