"""The station's pages as static files: one document for all pages, a style sheet, a module, an icon.

Guarantees: a browser that obeys their Content-Security-Policy fetches nothing from elsewhere, runs no inline script and
shows them in no frame but of origins that the line file names. They hold nothing of the line, so they need no token.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

from agent.doors.http.door import DoorSection
from agent.doors.http.routes import RouteRule, json_refused, route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import Route

    from agent.doors.http.routes import Call

DOCUMENT = "index.html"
PAGES = ("/", "/board/{number:int}", "/expert/{id:path}", "/engine", "/texts", "/review", "/line")
FILES = {
    DOCUMENT: "text/html; charset=utf-8",
    "station.css": "text/css; charset=utf-8",
    "station.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; object-src 'none'; frame-ancestors "
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again after an update of the agent, and then 304
}


def pages_section(frame_ancestors: Sequence[str] = ()) -> DoorSection:
    """For the end of the door's parts: its root is that of every path. ``frame_ancestors``: origins of pages that may
    show them in a frame."""
    policy = POLICY + (" ".join(("'self'", *frame_ancestors)) if frame_ancestors else "'none'")
    paths = [*((path, DOCUMENT) for path in PAGES), *((f"/{name}", name) for name in FILES if name != DOCUMENT)]
    return DoorSection(("/",), [_file_at(path, name, policy) for path, name in paths])


def _file_at(path: str, name: str, policy: str) -> Route:
    content = Path(__file__).with_name(name).read_bytes()
    headers = {
        **HEADERS,
        "content-security-policy": policy,
        "etag": f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"',
    }

    async def answer(call: Call) -> Response:
        if call.request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=FILES[name])

    return route("GET", path, answer, RouteRule(json_refused, is_open=True))
