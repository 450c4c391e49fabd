"""A thousand callers at once, and thousands of messages and files that are nothing."""

import asyncio
import random
import time
from collections import Counter
from types import SimpleNamespace

import grpc
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.doors.proto import inspection_pb2 as pb
from agent.doors.proto import inspection_pb2_grpc
from tests.drill.scene import COLOURS, EXPERTS, is_full, picture
from tests.waiting import until

pytestmark = pytest.mark.slow
CALLS = 1000
MALFORMED = 5000 if is_full() else 400
LIMIT = 64
IMAGE_PX = 256


def percentile(seconds, fraction):
    ordered = sorted(seconds)
    return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)] if ordered else float("nan")


async def flooded(scene, name, calls, at_once):
    """Ends by name, seconds of the admitted and the refused, and hints when to come again."""
    flood = SimpleNamespace(ends=Counter(), admitted_s=[], refused_s=[], hints=[])
    image = picture(0, IMAGE_PX)
    room = asyncio.Semaphore(at_once)

    async def call(stub, number):
        request = pb.InspectRequest(file=image, component=f"c{number % EXPERTS}", key=f"{name}{number}")
        async with room:
            started = time.monotonic()
            try:
                reply = await stub.Inspect(request, timeout=60.0)
            except grpc.RpcError as error:
                trailing = dict(error.trailing_metadata())
                flood.ends[trailing.get("coserve-reason", str(error.code()))] += 1
                flood.refused_s.append(time.monotonic() - started)
                flood.hints.append(trailing.get("grpc-retry-pushback-ms"))
                return
        verdict = pb.Verdict.Name(reply.parts[0].verdict)
        flood.ends[verdict] += 1
        flood.admitted_s.append(time.monotonic() - started)
        scene.accepted[request.key] = (request.component, 0)
        scene.answered[request.key] = verdict

    async with grpc.aio.insecure_channel(scene.socket) as channel:
        stub = inspection_pb2_grpc.InspectionStub(channel)
        await asyncio.gather(*(call(stub, number) for number in range(calls)))
    return flood


def test_thousand_concurrent_calls_are_judged_or_refused_with_a_retry_hint(scene, agents, report):
    scene.document["api"]["limits"] = {"requests": LIMIT}
    scene.write()
    agents.serve()
    asyncio.run(flooded(scene, "warm", LIMIT, LIMIT))
    full = asyncio.run(flooded(scene, "full", CALLS // 2, LIMIT))
    process = psutil.Process(agents.running.pid)
    before = process.memory_info().rss
    flood = asyncio.run(flooded(scene, "flood", CALLS, CALLS))
    grown = process.memory_info().rss - before
    assert agents.stop() == 0
    assert sum(flood.ends.values()) == CALLS
    assert set(flood.ends) <= {"VERDICT_OK", "VERDICT_NG", "QUEUE_FULL"}
    assert all(hint is not None and int(hint) > 0 for hint in flood.hints)
    assert grown < 200 * 2**20
    p99 = {name: percentile(each.admitted_s, 0.99) for name, each in (("at the limit", full), ("in the flood", flood))}
    ratio = p99["in the flood"] / p99["at the limit"]
    report(
        f"{CALLS} calls",
        dict(flood.ends)
        | {"grown MiB": grown // 2**20}
        | {f"p99 {name} ms": round(seconds * 1000) for name, seconds in p99.items()}
        | {"ratio": f"{ratio:.2f} ({'reached' if ratio <= 2.0 else 'SHORT of 2'})"}
        | {"median refusal ms": round(percentile(flood.refused_s, 0.5) * 1000)}
        | scene.account(),
    )


def test_malformed_requests_and_images_are_refused_or_unknown(scene, report):
    ends = Counter()
    chance = random.Random(5)
    good = picture(1)
    with scene.served():
        with grpc.insecure_channel(scene.socket) as channel:
            raw = channel.unary_unary("/coserve.v1.Inspection/Inspect")
            oip = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

            @settings(max_examples=MALFORMED // 4, deadline=None, database=None)
            @given(st.binary(max_size=200))
            def fuzz(content):
                for method in (raw, oip):
                    try:
                        method(content, timeout=30.0)
                        ends["answered"] += 1
                    except grpc.RpcError as error:
                        ends[error.code().name] += 1

            fuzz()
            stub = inspection_pb2_grpc.InspectionStub(channel)
            for _ in range(MALFORMED // 4):
                reply = stub.Inspect(pb.InspectRequest(file=damaged(good, chance), component="c0"), timeout=30.0)
                ends[pb.Verdict.Name(reply.parts[0].verdict)] += 1
        for _ in range(MALFORMED // 4):
            scene.drop_one(-1, damaged(good, chance))
        until(scene.is_finished)
        assert scene.is_up()
    rows = [row for row in scene.rows if row.subject.image in scene.dropped]
    assert ends.keys() <= {"INVALID_ARGUMENT", "NOT_FOUND", "INTERNAL", "UNIMPLEMENTED", "VERDICT_UNKNOWN", "answered"}
    assert {str(row.verdict) for row in rows} == {"UNKNOWN"}
    report("malformed", dict(ends) | scene.account())


def damaged(content, chance):
    """Cut, or filled with noise: never a whole image."""
    kind = chance.randrange(4)
    if kind == 0:
        return content[: chance.randrange(1, len(content) - 12)]
    if kind == 1:
        return bytes(chance.randrange(256) for _ in range(chance.randrange(1, 300)))
    if kind == 2:
        return content[:8] + bytes(len(content) - 8)
    return bytes([COLOURS[0][0]]) * chance.randrange(1, 100)
