"""`/v2`: health, metadata, configuration, statistics, repository and infer, for Triton's and KServe's HTTP clients.

Guarantees: answers are those of gRPC, by the same methods. A model's name may have slashes, percent-encoded or not. A
few bodies at a time are open, each until the desk has counted its images; a waiting image has one copy in memory. A
caller that disconnects withdraws its images.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

from agent.doors.access import Role
from agent.doors.http.door import DoorSection
from agent.doors.http.inference.bodies import index_request, infer_answer, infer_request, load_request, plain
from agent.doors.http.routes import STATUS, RouteRule, retry_after, route
from agent.doors.inference import InferenceService
from agent.doors.proto import inference_pb2 as pb
from agent.doors.refusals import invalid, text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.routing import Route

    from agent.doors.http.routes import Call
    from agent.doors.orders import Orders
    from agent.doors.statistics import CallStatistics
    from agent.faults.errors import OrderRefused
    from agent.line_file.api import ApiLimitsSection

    Answer = Callable[[Call], Awaitable[Response]]

V2 = "/v2"
MODEL, STORED = f"{V2}/models/{{model:path}}", f"{V2}/repository/models/{{model:path}}"
FEW_BYTES = 2**16  # of a body without a tensor
OPEN_BODIES = 4  # inflated, and not yet counted by the desk
REQUESTS = 256  # of each address
STALL_S = 30.0
IN_JSON = "send it in the JSON's `parameters`"


class InferenceEndpoint:
    """The section of the door for inference, over the methods of gRPC."""

    def __init__(self, orders: Orders, limits: ApiLimitsSection, statistics: CallStatistics) -> None:
        self._service = InferenceService(orders, limits, statistics)
        self._stop = orders.stop
        self._limits = limits
        self._open_bodies = asyncio.Semaphore(OPEN_BODIES)

    def section(self) -> DoorSection:
        requests = min(self._limits.requests, REQUESTS)
        return DoorSection((V2,), self._routes(), _refusal, requests, STALL_S, self._stop)

    def _routes(self) -> list[Route]:
        ask, tell = RouteRule(refused), RouteRule(refused, body_bytes=FEW_BYTES)
        infer = RouteRule(refused, body_bytes=self._limits.message)
        load, unload = (RouteRule(refused, Role.ADMIN, f"{each} model", FEW_BYTES) for each in ("load", "unload"))
        return [
            route("GET", f"{V2}/health/live", self._live, ask),
            route("GET", f"{V2}/health/ready", self._ready, ask),
            route("GET", V2, self._server, ask),
            route("POST", f"{V2}/repository/index", self._index, tell),
            route("POST", f"{STORED}/load", self._load, load),
            route("POST", f"{STORED}/unload", self._unload, unload),
            route("GET", f"{V2}/models/stats", self._statistics, ask),
            *_of_model("POST", "/infer", self._infer, infer),
            *_of_model("GET", "/ready", self._model_ready, ask),
            *_of_model("GET", "/config", self._config, ask),
            *_of_model("GET", "/stats", self._statistics, ask),
            *_of_model("GET", "", self._metadata, ask),
        ]

    async def _live(self, call: Call) -> Response:
        return JSONResponse(plain(await self._service.ServerLive(pb.ServerLiveRequest())))

    async def _ready(self, call: Call) -> Response:
        return _readiness(await self._service.ServerReady(pb.ServerReadyRequest()))

    async def _server(self, call: Call) -> Response:
        served = plain(await self._service.ServerMetadata(pb.ServerMetadataRequest()))
        return JSONResponse(served | {"extensions": [*served["extensions"], "binary_tensor_data"]})

    async def _model_ready(self, call: Call) -> Response:
        return _readiness(await self._service.ModelReady(pb.ModelReadyRequest(**_named(call))))

    async def _metadata(self, call: Call) -> Response:
        return JSONResponse(plain(await self._service.ModelMetadata(pb.ModelMetadataRequest(**_named(call)))))

    async def _config(self, call: Call) -> Response:
        return JSONResponse(plain((await self._service.ModelConfig(pb.ModelConfigRequest(**_named(call)))).config))

    async def _statistics(self, call: Call) -> Response:
        return JSONResponse(plain(await self._service.ModelStatistics(pb.ModelStatisticsRequest(**_named(call)))))

    async def _index(self, call: Call) -> Response:
        found = await self._service.RepositoryIndex(index_request(call.body))
        return JSONResponse([plain(model) for model in found.models])

    async def _load(self, call: Call) -> Response:
        call.about = _named(call)["name"]
        await self._service.RepositoryModelLoad(load_request(call.about, call.body))
        return JSONResponse({})

    async def _unload(self, call: Call) -> Response:
        call.about = _named(call)["name"]
        await self._service.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=call.about))
        return JSONResponse({})

    async def _infer(self, call: Call) -> Response:
        with ExitStack() as opened:
            opened.callback(call.room.leave)
            await self._open_bodies.acquire()
            opened.callback(self._open_bodies.release)
            asked = call.request
            for name in asked.query_params:
                raise invalid(name[:100], f"is in the address, where no parameter is read - {IN_JSON}")
            request, is_binary = infer_request(call.body, asked.headers, self._limits.message, str(asked.url))
            call.body = b""
            named = _named(call)
            request.model_name, request.model_version = named["name"], named.get("version", "")
            answering = self._service.infer(request, opened.close)
            del request  # so that waiting images have one copy in memory
            return infer_answer(await answering, is_binary)


def _of_model(method: str, what: str, answer: Answer, rule: RouteRule) -> list[Route]:
    paths = (f"{MODEL}/versions/{{version}}{what}", f"{MODEL}{what}")
    return [route(method, path, answer, rule) for path in paths]


def _named(call: Call) -> dict[str, str]:
    """``name`` and ``version`` of a path's model, if it has them."""
    names = call.request.path_params
    return {field: names[name] for field, name in (("name", "model"), ("version", "version")) if name in names}


def _readiness(response: pb.ServerReadyResponse | pb.ModelReadyResponse) -> Response:
    return JSONResponse(plain(response), 200 if response.ready else 503)


def _refusal(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status)


def refused(refusal: OrderRefused) -> Response:
    headers = {"coserve-reason": str(refusal.reason), **retry_after(refusal)}
    return JSONResponse({"error": text(str(refusal))}, STATUS[refusal.reason], headers)
