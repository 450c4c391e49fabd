"""Arguments that several commands share: line file, address of a running agent, credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LineFile = Annotated[Path, typer.Argument(metavar="LINE.yaml", help="the line file", show_default=False)]
Target = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="address of a running agent: unix:PATH or HOST:PORT")
]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="PEM file of the authority to trust at HOST:PORT; default: the line file's")
]
TokenFile = Annotated[Path | None, typer.Option(help="file with the token for HOST:PORT; default: the line file's")]
Certificate = Annotated[
    Path | None, typer.Option(help="PEM file: the client certificate, where callers need one (mTLS)")
]
Key = Annotated[Path | None, typer.Option(help="PEM file: its private key")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on stdout, nothing else there")]
