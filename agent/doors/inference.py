"""Methods of the Open Inference Protocol for both wires, with Triton's extensions that its clients count on.

A model is a component's route, or one expert as `expert:ID`; each has one version. A call that names a board is a
stored inspection; any other call leaves no record.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from agent.doors import parameters, tensors
from agent.doors.desk import ImageOrder
from agent.doors.proto import inference_pb2 as pb
from agent.doors.refusals import copied, text
from agent.doors.statistics import VERSION
from agent.faults.errors import OrderRefused, Reason
from agent.subject import CALLERS, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.doors.budget import Room
    from agent.doors.desk import ModelView, VerdictView
    from agent.doors.orders import Orders
    from agent.doors.statistics import CallStatistics
    from agent.doors.tensors import InferInputs
    from agent.line_file.api import ApiLimitsSection

SERVER = "coserve"
PLATFORM = "coserve"
EXPERT = "expert:"
EXTENSIONS = ("model_configuration", "model_repository", "statistics")
DATA_TYPES = {tensors.BYTES: pb.TYPE_STRING, tensors.FP32: pb.TYPE_FP32}
LISTED = "RepositoryIndex (POST /v2/repository/index) lists them"
INPUTS = (tensors.IMAGE, tensors.BOARD, tensors.REF)
MAX_MESSAGE = "max_message_bytes"


class InferenceService:
    """Methods by the protocol's names, for each wire. Its door turns raised refusals into answers."""

    def __init__(self, orders: Orders, limits: ApiLimitsSection, statistics: CallStatistics) -> None:
        self._orders = orders
        self._desk = orders.desk
        self._limits = limits
        self._statistics = statistics

    async def ServerLive(self, request: pb.ServerLiveRequest, _: Room | None = None) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, _: Room | None = None) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self._orders.ask(self._desk.unready) is None)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, _: Room | None = None
    ) -> pb.ServerMetadataResponse:
        extensions = [*EXTENSIONS, f"{MAX_MESSAGE}:{self._limits.message}"]
        return pb.ServerMetadataResponse(name=SERVER, version=version("coserve"), extensions=extensions)

    async def ModelReady(self, request: pb.ModelReadyRequest, _: Room | None = None) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=(await self._model(request.name, request.version)).is_ready)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, _: Room | None = None) -> pb.ModelMetadataResponse:
        """Tensors, equal for all models, with more for anomaly experts; -1: number of images."""
        model = await self._model(request.name, request.version)
        response = pb.ModelMetadataResponse(name=text(model.name), versions=[VERSION], platform=PLATFORM)
        for name in INPUTS:
            response.inputs.add(name=name, datatype=tensors.BYTES, shape=[-1])
        for name, datatype in _outputs_of(model).items():
            response.outputs.add(name=name, datatype=datatype, shape=[-1])
        return response

    async def ModelConfig(self, request: pb.ModelConfigRequest, _: Room | None = None) -> pb.ModelConfigResponse:
        """Configuration in Triton's words, with facts of the model as parameters."""
        model = await self._model(request.name, request.version)
        config = pb.ModelConfig(name=text(model.name), platform=PLATFORM, backend=SERVER, max_batch_size=0)
        for name in INPUTS:
            config.input.add(name=name, data_type=pb.TYPE_STRING, dims=[-1], optional=name != tensors.IMAGE)
        for name, datatype in _outputs_of(model).items():
            config.output.add(name=name, data_type=DATA_TYPES[datatype], dims=[-1])
        for key, value in _facts(model).items():
            config.parameters[key].string_value = text(value)
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, _: Room | None = None
    ) -> pb.ModelStatisticsResponse:
        """Statistics of one model, or of all."""
        if request.name:
            names = [(await self._model(request.name, request.version)).name]
        else:
            names = [model.name for model in await self._models()]
        return self._statistics.of(names)

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, _: Room | None = None
    ) -> pb.RepositoryIndexResponse:
        """List all models, or those that are ready."""
        response = pb.RepositoryIndexResponse()
        for model in await self._models():
            if model.is_ready or not request.ready:
                state = "READY" if model.is_ready else "UNAVAILABLE"
                response.models.add(
                    name=text(model.name), version=VERSION, state=state, reason=text(model.reason or "")
                )
        return response

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, _: Room | None = None
    ) -> pb.RepositoryModelLoadResponse:
        """Load a model into room that no request needs sooner."""
        if request.parameters:
            raise OrderRefused(
                Reason.INVALID, "models come from the line file, not from a call - change it there, and reload"
            )
        await self._orders.ask(self._desk.load, request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, _: Room | None = None
    ) -> pb.RepositoryModelUnloadResponse:
        await self._orders.ask(self._desk.unload, request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def infer(self, request: pb.ModelInferRequest, on_taken: Callable[[], None]) -> pb.ModelInferResponse:
        """Raises OrderRefused."""
        _check_version(request.model_version)
        model, id_ = request.model_name, request.id
        with self._statistics.timed(model) as parts:
            most = self._limits.requests
            if tensors.takes_long(request):
                inputs = await self._orders.aside(tensors.inputs_of, request, most)
            else:
                inputs = tensors.inputs_of(request, most)
            orders, outputs, is_raw = _orders_of(model, inputs), inputs.outputs, inputs.is_raw
            del request, inputs  # so that waiting images have one copy in memory
            parts += [each[0] for each in await _all(self._orders, orders, on_taken)]
        response = tensors.answer(parts, outputs, is_raw=is_raw)
        response.model_name = model
        response.model_version = VERSION
        response.id = id_
        return response

    async def _models(self) -> Sequence[ModelView]:
        return await self._orders.ask(self._desk.models)

    async def _model(self, name: str, version: str) -> ModelView:
        _check_version(version)
        models = {model.name: model for model in await self._models()}
        if name not in models:
            raise OrderRefused(Reason.NOT_FOUND, f"no model {name[:200]!r} - {LISTED}")
        return models[name]


def _orders_of(model: str, inputs: InferInputs) -> list[ImageOrder]:
    """Orders of a call, one for each image. Raises OrderRefused."""
    board_type, key = inputs.named.get(parameters.BOARD_TYPE), inputs.named.get(parameters.KEY)
    images = zip(inputs.images, inputs.boards, inputs.refs, strict=True)
    component, expert = _component_or_expert(model)
    now, count = datetime.now(UTC).astimezone(), len(inputs.images)
    keys = [f"{key}/{number}" if key and count > 1 else key or "" for number in range(count)]
    return [
        ImageOrder(
            subject=Subject(own, CALLERS, own, now, component, expert, board, board_type, ref),
            image=image,
            is_kept=board is not None,
            wants_maps=tensors.ANOMALY_MAP in inputs.outputs,
        )
        for own, (image, board, ref) in zip(keys, images, strict=True)
    ]


async def _all(
    orders: Orders, several: Sequence[ImageOrder], on_taken: Callable[[], None]
) -> Sequence[Sequence[VerdictView]]:
    """Verdicts of each order; if one is refused, the others are withdrawn."""
    *first, last = several
    tasks = [asyncio.create_task(orders.judged(order)) for order in first]
    tasks.append(asyncio.create_task(orders.judged(last, on_taken=on_taken)))
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in ended:
        error = task.exception()
        if isinstance(error, OrderRefused):
            raise copied(error)
        if error is not None:
            raise error
    return [task.result() for task in tasks]


def _component_or_expert(model: str) -> tuple[str | None, str | None]:
    """Raises OrderRefused for a model without a name."""
    expert = model.removeprefix(EXPERT)
    if not expert:
        raise OrderRefused(Reason.NOT_FOUND, f"no model is named - {LISTED}")
    return (model, None) if expert == model else (None, expert)


def _check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise OrderRefused(Reason.NOT_FOUND, f"no version {version[:20]!r} - every model has version {VERSION} alone")


def _outputs_of(model: ModelView) -> dict[str, str]:
    return tensors.OUTPUTS | tensors.ANOMALY_OUTPUTS if model.measures_anomalies else tensors.OUTPUTS


def _facts(model: ModelView) -> dict[str, str]:
    facts = {"experts": ", ".join(model.experts), "labels": ", ".join(model.labels), "max_batch": str(model.max_batch)}
    if model.input_px is not None:
        facts["input_px"] = "{} x {}".format(*model.input_px)
    return facts
