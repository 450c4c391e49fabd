"""Arguments that several commands share: line file, address of a running agent, credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LineFile = Annotated[Path, typer.Argument(metavar="LINE.yaml", help="the line file", show_default=False)]
Target = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="ask the agent that runs there: unix:PATH or HOST:PORT")
]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="PEM file of the authority to trust at HOST:PORT; default the line's own")
]
TokenFile = Annotated[Path | None, typer.Option(help="file of the token to show at HOST:PORT; default the line's own")]
Certificate = Annotated[Path | None, typer.Option(help="PEM file: the certificate to show, where callers must (mTLS)")]
Key = Annotated[Path | None, typer.Option(help="PEM file: its private key")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]
