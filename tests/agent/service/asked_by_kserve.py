"""Ask a server with KServe's client, in the environment that has it; the answers as JSON: URL MODEL IMAGE BOARD."""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

OUTPUTS = ("VERDICT", "LABEL", "SCORE")


def request(model, image, board=None, wanted=()):
    tensor = InferInput("IMAGE", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([image], dtype=object), binary_data=True)
    return InferRequest(
        model, [tensor], parameters={"board": board, "ref": "R1"} if board else None, request_outputs=wanted
    )


def values(response):
    return {output.name: output.as_numpy().tolist() for output in response.outputs if output.name in OUTPUTS}


async def ask(url, model, image, board):
    in_binary = [RequestedOutput(name, {"binary_data": True}) for name in OUTPUTS]
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        told = {
            "live": await client.is_server_live(url),
            "ready": await client.is_server_ready(url),
            "models": [await client.is_model_ready(url, name) for name in (model, "nobody")],
            "json": values(await client.infer(url, request(model, image), model)),
            "binary": values(await client.infer(url, request(model, image, wanted=in_binary), model)),
            "board": values(await client.infer(url, request(model, image, board), model)),
        }
        try:
            await client.infer(url, request("nobody", image), "nobody")
        except httpx.HTTPStatusError as error:
            told["refused"] = str(error)
    sys.stdout.write(json.dumps(told, default=lambda value: value.decode()))


url, model, image, board = sys.argv[1:]
asyncio.run(ask(url, model, Path(image).read_bytes(), board))
