"""A station of plain records behind the real door and pages: what the pages are drawn from.

``python -m tests.agent.doors.http.pages.plain_station PORT KIND`` serves it to look at. Kinds: busy,
empty, failing, hostile.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tempfile
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw
from starlette.responses import JSONResponse, Response

from agent.doors.access import Role, Tokens
from agent.doors.http.door import DoorSection, WebDoor
from agent.doors.http.pages.files import pages_section
from agent.doors.http.routes import RouteRule, json_refused, route
from agent.doors.http.server import WebServer
from agent.line_file.api import ApiSection
from experts.errors import OrderRefused, Refusing

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.routing import Route

    from agent.doors.http.routes import Call

TOKENS = {"anna": "admin", "bert": "read"}  # each one's token is its name and `-secret`
LEAST = {"GET": Role.READ, "POST": Role.OPERATE, "DELETE": Role.OPERATE}
OPERATORS = ("GET /api/line", "GET /api/audit")
HOSTILE = "<img src=x onerror=alert(1)>\"'&</script>\u202e"
COMPONENTS = ("capacitor", "connector", "solder joint", "chip", "polarity mark")
LABELS = {"capacitor": "tombstone", "connector": "bent pin", "solder joint": "bridge", "chip": "scratch"}


def moment(ago_s: float) -> str:
    return (datetime.now().astimezone() - timedelta(seconds=ago_s)).isoformat(timespec="milliseconds")


class PlainStation:
    """Answers every route that the pages ask. ``state`` may be replaced between requests."""

    def __init__(self, kind: str = "busy") -> None:
        self.kind = kind
        self.random = random.Random(7)
        self.results = {} if kind == "empty" else {each["seq"]: each for each in map(self._result, range(1, 61))}
        self.state = self._state()
        self.age_s = 0

    def _text(self, usual: str) -> str:
        return HOSTILE if self.kind == "hostile" else usual

    def _result(self, seq: int) -> dict[str, Any]:
        verdict = ("NG", "OK", "UNKNOWN", "OK", "NG", "OK")[seq % 6]
        component = COMPONENTS[seq % 5]
        ago_s = (61 - seq) * 37.0
        label = {"NG": LABELS.get(component, "wrong way"), "OK": "good", "UNKNOWN": None}[verdict]
        return {
            "seq": seq,
            "file": "0a1b2c3d",
            "key": f"inbox/{seq}",
            "board": self._text(f"SN-2026-{7300 + seq // 6:06}"),
            "board_type": "demo-board",
            "ref": f"C{seq % 40}",
            "component": self._text(component),
            "image": self._text(f"board_{seq}.png"),
            "verdict": verdict,
            "label": label and self._text(label),
            "score": None if verdict == "UNKNOWN" else 0.93 + (seq % 7) / 100,
            "reason": self._text("no expert answered in time") if verdict == "UNKNOWN" else None,
            "experts": [f"cls/{component.split()[0]}", f"det/{component.split()[0]}"],
            "unproven": seq % 2 == 1,
            "arrived_at": moment(ago_s + 0.8),
            "finished_at": moment(ago_s),
            "seconds": 0.3 + self.random.random(),
            "has_image": seq % 11 != 0,
            "has_maps": verdict == "NG",
            "review": None,
        }

    def _detail(self, seq: int) -> dict[str, Any]:
        result = self.results[seq]
        first, second = result["experts"]
        box = {
            "label": result["label"] or "?",
            "score": 0.91,
            "left": 150.0,
            "top": 90.0,
            "right": 260.0,
            "bottom": 190.0,
        }
        is_ng = result["verdict"] == "NG"
        steps = [
            {
                "expert": first,
                "label": "passed",
                "score": 0.98,
                "boxes": [],
                "outputs": [],
                "unproven": False,
                "anomaly": {"score": 0.61 if is_ng else 0.2, "threshold": 0.42, "has_map": is_ng},
            },
            {
                "expert": second,
                "label": result["label"] or "?",
                "score": result["score"] or 0.4,
                "outputs": [{"label": "bridge", "score": 0.7, "threshold": 0.5, "holds": True}] if seq % 4 == 0 else [],
                "boxes": [box] if is_ng else [],
                "unproven": result["unproven"],
                "anomaly": None,
            },
        ]
        reviews = [result["review"]] if result["review"] else []
        return {
            **result,
            "steps": steps,
            "box": [20, 30, 220, 180],
            "size": [300, 400],
            "config_sha256": "0" * 64,
            "reviews": reviews,
            "timeline": self._course(result),
        }

    def _course(self, result: dict[str, Any]) -> dict[str, Any]:
        load = {"from": "host", "to": "cuda0", "seconds": 0.21, "evicted": ["cls/chip"]}
        steps = [
            {
                "expert": expert,
                "executor": "cuda0 0",
                "processor": "cuda0",
                "joined": index > 0,
                "queued_s": 0.1,
                "load": load if index == 0 else None,
                "batch": {"images": 12, "began_s": 0.3, "seconds": 0.08},
            }
            for index, expert in enumerate(result["experts"])
        ]
        return {"steps": steps, "total_s": result["seconds"]}

    def _state(self) -> dict[str, Any]:
        is_empty, is_failing = self.kind == "empty", self.kind == "failing"
        boards = [
            {
                "number": None if n == 0 else 171 - n,
                "serial": self._text(f"SN-2026-{7311 - n:06}"),
                "board_type": "demo-board",
                "verdict": (None if n == 0 else ("NG" if n % 7 == 3 else "UNKNOWN" if n == 12 else "OK")),
                "opened_at": moment(180.0 * n + 60),
                "closed_at": moment(180.0 * n),
                "takt_s": 171.0,
                "counts": {"OK": 6, "NG": 0, "UNKNOWN": 0},
                "missing": 2 if n == 0 else 0,
                "reason": "missing: 2 of resistor" if n == 0 else None,
            }
            for n in range(0 if is_empty else 24)
        ]
        alarms = [
            {
                "number": 3,
                "name": "camera/belt",
                "message": self._text("camera belt is OFFLINE: no frame for 42 s"),
                "raised_at": moment(300),
            },
            {
                "number": 2,
                "name": "disk",
                "message": "3.1 GiB left on /var/lib/coserve: images are no longer kept",
                "raised_at": moment(9000),
            },
        ]
        mib = 2**20
        return {
            "line": self._text("top-side"),
            "version": "0.2.0",
            "config_sha256": "0" * 64,
            "phase": None,
            "judging": {
                "state": "FAILING" if is_failing else "IDLE" if is_empty else "JUDGING",
                "reason": "results cannot be stored: the disk is full" if is_failing else None,
            },
            "shift": {
                "since": moment(3 * 3600),
                "verdicts": dict.fromkeys(("OK", "NG", "UNKNOWN"), 0)
                if is_empty
                else {"OK": 10_243, "NG": 61, "UNKNOWN": 3},
                "boards": {"OK": 0 if is_empty else 164, "NG": 0 if is_empty else 6, "UNKNOWN": 0 if is_empty else 1},
                "takt_s": None if is_empty else 191.0 if is_failing else 171.0,
                "takt_target_s": 180.0,
                "takts": [{"board_type": "demo-board", "takt_s": 171.0, "takt_target_s": 180.0}],
                "reviews": {"agree": 9, "false_call": 2, "missed_defect": 1, "decided": 3},
                "pareto": []
                if is_empty
                else [
                    {"component": self._text(name), "label": label, "images": 31 - 6 * n}
                    for n, (name, label) in enumerate([*LABELS.items(), ("polarity mark", None)])
                ],
            },
            "alarms": alarms if is_failing or self.kind == "hostile" else [],
            "boards": boards,
            "cases": [each for each in reversed(self.results.values()) if each["verdict"] != "OK"][:12],
            "sources": [
                {
                    "name": self._text("belt"),
                    "kind": "camera",
                    "state": "OFFLINE" if is_failing else "STREAMING",
                    "alarm": "no frame for 42 s" if is_failing else None,
                    "received": 4000,
                    "waiting": 0,
                    "per_s": 4.0,
                    "dropped": 0,
                },
                {
                    "name": "inbox",
                    "kind": "folder",
                    "state": "READING",
                    "alarm": None,
                    "received": 90,
                    "waiting": 3,
                    "per_s": 1.2,
                    "dropped": 0,
                },
            ],
            "receivers": [{"name": "mes", "waiting": 0, "alarm": None}],
            "executors": [
                {
                    "executor": 0,
                    "processor": "cuda0",
                    "worker": "main",
                    "requests": 12,
                    "running": "cls/capacitor",
                    "wait_s": 0.82,
                    "busy": 0.91,
                },
                {
                    "executor": 1,
                    "processor": "cpu",
                    "worker": "main",
                    "requests": 3,
                    "running": None,
                    "wait_s": 1.4,
                    "busy": 0.37,
                },
            ],
            "memories": [
                {
                    "name": "cuda0",
                    "used_bytes": 6100 * mib,
                    "capacity_bytes": 6500 * mib,
                    "experts": 31,
                    "lease_bytes": 0,
                    "lease_capacity_bytes": 0,
                },
                {
                    "name": "host",
                    "used_bytes": 9000 * mib,
                    "capacity_bytes": 24_000 * mib,
                    "experts": 164,
                    "lease_bytes": 0,
                    "lease_capacity_bytes": 0,
                },
            ],
            "loads": {
                "switches": 1712,
                "switches_per_min": 9.4,
                "evictions": 1544,
                "bytes_read": 10**11,
                "wait_p99_s": 1.31,
            },
            "texts": {"under_way": 2, "ended": 40, "tokens_per_s": 118.0},
            "standing": [],
            "unproven": ["cls/capacitor"],
        }

    # ---- the routes

    def routes(self) -> list[Route]:
        answers: dict[str, Callable[[Call], Any]] = {
            "GET /api/state": lambda _: {"state": self.state, "ages": {"uptime_s": 4000.0, "at": moment(0)}},
            "GET /api/results": self._results,
            "GET /api/results/{seq:int}": lambda call: self._detail(call.request.path_params["seq"]),
            "GET /api/results/{seq:int}/image": lambda call: picture(call.request.path_params["seq"], 400, 300),
            "GET /api/results/{seq:int}/thumbnail": lambda call: picture(call.request.path_params["seq"], 160, 120),
            "GET /api/results/{seq:int}/frame": lambda call: picture(call.request.path_params["seq"], 900, 600),
            "GET /api/results/{seq:int}/maps/{step:int}": lambda _: heat(),
            "GET /api/boards": self._boards,
            "GET /api/boards/{number:int}": self._board,
            "POST /api/boards/rework": lambda call: {"who": call.caller.name, "reason": None, "at": moment(0)},
            "POST /api/reviews": self._review,
            "DELETE /api/reviews/{number:int}": self._undo,
            "GET /api/experts": lambda _: {
                "experts": [self._expert(f"cls/{name}") for name in ("capacitor", "chip", "connector")]
            },
            "GET /api/expert": self._expert_detail,
            "GET /api/engine": lambda _: self._engine(),
            "GET /api/texts": lambda _: self._texts(),
            "GET /api/explain": self._explain,
            "GET /api/line": lambda _: {
                "file": "/etc/coserve/line.yaml",
                "text": "line: top-side\nexperts: {}\n",
                "sha256": "0" * 64,
                "is_served": True,
            },
            "POST /api/line/check": lambda _: {
                "problems": [
                    {"line": 2, "column": 1, "key": "experts", "message": self._text("no expert: name one at least")}
                ]
            },
            "POST /api/reload": lambda _: {
                "is_applied": True,
                "problems": [],
                "added": ["cls/new"],
                "replaced": [],
                "removed": [],
                "needs_restart": [],
            },
            "GET /api/audit": lambda _: {
                "entries": [
                    {
                        "number": 1,
                        "at": moment(60),
                        "who": self._text("anna"),
                        "role": "operate",
                        "action": "review",
                        "subject": "result 59",
                        "outcome": "done",
                        "config_sha256": "0" * 64,
                    }
                ],
                "next": None,
            },
        }
        return [self._route(where, answer) for where, answer in answers.items()]

    def _route(self, where: str, answer: Callable[[Call], Any]) -> Route:
        method, path = where.split(" ")
        least = Role.OPERATE if where in OPERATORS else LEAST[method]

        async def answered(call: Call) -> Response:
            try:
                told = answer(call)
            except KeyError:
                raise OrderRefused(Refusing.NOT_FOUND, "no such result") from None
            if isinstance(told, Response):
                return told
            tag = f'"{hash(json.dumps(told.get("state"), sort_keys=True))}"'
            if path == "/api/state" and call.request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers={"etag": tag, "age": str(self.age_s)})
            headers = {"etag": tag, "cache-control": "no-cache", "age": str(self.age_s)}
            return JSONResponse(told, 201 if method == "POST" else 200, headers)

        action = path if method in ("POST", "DELETE") else None
        return route(method, path, answered, RouteRule(json_refused, least, action, body_bytes=65_536))

    def _results(self, call: Call) -> dict[str, Any]:
        asked = call.request.query_params
        found = [
            each
            for each in reversed(self.results.values())
            if not asked.get("verdict") or each["verdict"] == asked["verdict"]
        ]
        found = [each for each in found if each["seq"] < int(asked.get("before", 10**9))]
        page = found[:25]
        return {"results": page, "next": page[-1]["seq"] if len(found) > 25 else None}

    def _boards(self, call: Call) -> dict[str, Any]:
        serial = call.request.query_params["serial"]
        found = [each for each in self.state["boards"] if each["number"] is not None and each["serial"] == serial]
        return {"boards": found[:1], "next": None}

    def _board(self, call: Call) -> dict[str, Any]:
        number = call.request.path_params["number"]
        tile = {each["number"]: each for each in self.state["boards"]}[number]
        parts = [
            {
                **self.results[seq],
                "board": tile["serial"],
                "box": [60 + 210 * (n % 4), 60 + 180 * (n // 4), 220 + 210 * (n % 4), 200 + 180 * (n // 4)],
            }
            for n, seq in enumerate(range(1, 13))
        ]
        if number % 2:
            parts = [{**part, "box": None} for part in parts]
        return {
            **tile,
            "opened_at": parts[0]["arrived_at"],
            "parts": parts,
            "size": [600, 900],
            "frame": 1,
            "reworks": [{"who": "anna", "reason": self._text("resoldered C4"), "at": moment(900)}],
            "is_cut": False,
        }

    def _review(self, call: Call) -> dict[str, Any]:
        given = json.loads(call.body)
        result = self.results[given["result"]]
        finding = {("NG", "OK"): "false_call", ("OK", "NG"): "missed_defect"}.get(
            (result["verdict"], given["verdict"]), "agree"
        )
        finding = "decided" if result["verdict"] == "UNKNOWN" else finding
        result["review"] = {
            "number": result["seq"] * 10,
            "finding": finding,
            "who": call.caller.name,
            "at": moment(0),
            "undone_at": None,
            "undone_by": None,
            **given,
        }
        return result["review"]

    def _undo(self, call: Call) -> dict[str, Any]:
        result = self.results[call.request.path_params["number"] // 10]
        review, result["review"] = result["review"], None
        return review

    def _expert(self, name: str) -> dict[str, Any]:
        return {
            "id": self._text(name),
            "components": [self._text("capacitor")],
            "architecture": "resnet18",
            "memories": ["cuda0"],
            "usage_profiled": 0.21,
            "usage_seen": 0.34,
            "loads": 41,
            "evictions": 40,
            "standing": None,
            "unproven": "not compared with its known answers yet",
            "false_calls": 2,
            "reviewed_ng": 14,
        }

    def _expert_detail(self, call: Call) -> dict[str, Any]:
        latency = {"one_s": 0.004, "batch": 16, "batch_s": 0.03, "load_s": {"host": 0.02, "disk": 0.3}}
        return {
            **self._expert(call.request.query_params["id"]),
            "id": call.request.query_params["id"],
            "labels": ["good", self._text("tombstone")],
            "task": "classify",
            "latency": {"cuda": latency, "cpu": {**latency, "one_s": 0.05}},
            "drift": 0.13,
            "reviews": {"agree": 11, "false_call": 2, "missed_defect": 1, "decided": 0},
            "seen": {"images": 8123, "batches": 702, "p50_s": 0.31, "p99_s": 1.2},
            "evictions_recent": [
                {
                    "at": moment(60),
                    "memory": "cuda0",
                    "stage": "unused",
                    "why": self._text("nothing waits for it"),
                    "for": "cls/chip",
                    "candidates": ["cls/chip", "cls/cap"],
                }
            ],
        }

    def _engine(self) -> dict[str, Any]:
        def spans(rate: int, longest_s: float, most: int) -> list[list[Any]]:
            begins = sorted(-60 * self.random.random() for _ in range(rate))
            return [
                [
                    begin,
                    min(begin + longest_s * self.random.random(), 0),
                    f"cls/{self.random.randrange(20)}",
                    self.random.randrange(1, most),
                ]
                for begin in begins
            ]

        executors = [
            {name: each[name] for name in ("executor", "processor", "worker")} | {"spans": spans(300, 0.3, 16)}
            for each in self.state["executors"]
        ]
        memories = [
            {**each, "experts": [{"id": f"cls/{n}", "bytes": 10**7} for n in range(5)]}
            for each in self.state["memories"]
        ]
        links = [
            {"name": "host->cuda0", "spans": spans(60, 0.4, 10**8)},
            {"name": "disk->host", "spans": spans(12, 2.0, 10**8)},
        ]
        return {"at": moment(0), "span_s": 60.0, "executors": executors, "links": links, "memories": memories}

    def _texts(self) -> dict[str, Any]:
        rows = [
            {
                "number": n,
                "model": self._text("llm/notes"),
                "expert": "llm/notes",
                "waited_s": 0.4 * n,
                "read_tokens": 512,
                "written_tokens": 20 * n,
            }
            for n in (1, 2)
        ]
        models = [
            {"name": "llm/notes", "experts": ["llm/notes"], "context_tokens": 4096, "is_ready": True, "reason": None}
        ]
        return {"models": models, "under_way": rows, "tokens_per_s": 118.2, "first_token_s": 0.31}

    def _explain(self, call: Call) -> dict[str, Any]:
        subject = call.request.query_params["subject"]
        sentences = [
            self._text("It waited 0.10 s in the group of cls/capacitor on cuda0."),
            "The group waited 0.21 s for its expert to be loaded from host.",
        ]
        return {"subject": subject, "sentences": sentences, "timeline": None}


def picture(seq: int, width: int, height: int) -> Response:
    image = Image.new("RGB", (width, height), (24, 74, 52))
    pen = ImageDraw.Draw(image)
    unit = width / 400
    for n in range(14):
        pen.line(
            [(0, (20 + n * 24) * unit), (width, (20 + n * 24 + seq % 9) * unit)],
            fill=(36, 98, 70),
            width=max(1, int(3 * unit)),
        )
    pen.rectangle(
        [90 * unit, 80 * unit, 310 * unit, 220 * unit],
        fill=(46, 48, 52),
        outline=(200, 200, 205),
        width=max(1, int(4 * unit)),
    )
    pen.line([(160 * unit, 100 * unit), (250 * unit, 180 * unit)], fill=(170, 172, 176), width=max(1, int(5 * unit)))
    return png(image)


def heat() -> Response:
    image = Image.new("RGBA", (40, 30))
    image.putdata(
        [
            (255, max(0, 220 - 16 * distance), 0, max(0, 230 - 24 * distance))
            for y in range(30)
            for x in range(40)
            for distance in [int(((x - 20) ** 2 + (y - 14) ** 2) ** 0.5)]
        ]
    )
    return png(image)


def png(image: Image.Image) -> Response:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return Response(
        stream.getvalue(), media_type="image/png", headers={"cache-control": "private, max-age=300, immutable"}
    )


class Served:
    """The station at a port. ``stop`` and ``start`` as an agent's restart: same port, nothing else kept."""

    def __init__(self, station: PlainStation, port: int = 0) -> None:
        self.station = station
        self.port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name in TOKENS:
                Path(folder, name).write_text(f"{name}-secret", "utf-8")
            tokens = {name: {"role": role, "file": f"{folder}/{name}"} for name, role in TOKENS.items()}
            values = {"http": f"127.0.0.1:{self.port}", "tokens": tokens}
            api = ApiSection.model_validate(values, context={"folder": Path(folder)})
            known = Tokens(api)
        parts = [DoorSection(("/api",), self.station.routes()), pages_section()]
        self._server = WebServer(api, WebDoor(parts, known, lambda *_: None, api))
        self._server.start()
        self.port = int(self._server.addresses[0].rpartition(":")[2])

    def stop(self) -> None:
        self._server.stop()


if __name__ == "__main__":
    print(Served(PlainStation(sys.argv[2]), int(sys.argv[1])).url)  # noqa: T201 - to be opened
    threading.Event().wait()
