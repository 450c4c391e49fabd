"""Every route and every method of a served line, tried with a token that may only read, and without one."""

import json
import sqlite3
from contextlib import closing

import grpc
import numpy as np
import pytest
import tritonclient.http as triton

from agent.doors.access import Role
from agent.doors.proto import inference_pb2, inspection_pb2
from tests.agent.doors.http.callers import asked
from tests.agent.service.fake_line import picture
from tests.waiting import until

ROLES = ("read", "inspect", "operate", "admin")
DEADLINE_S = 30.0
FOREVER = {"WatchResults", "Watch"}
CHANGING = {
    "Trigger": Role.OPERATE, "Reload": Role.ADMIN, "RepositoryModelLoad": Role.ADMIN,
    "RepositoryModelUnload": Role.ADMIN,
}  # fmt: skip


@pytest.fixture
def service(line):
    tokens = {role: {"role": role, "file": f"{role}.token"} for role in ROLES}
    for role in ROLES:
        (line.folder / f"{role}.token").write_text(f"{role}-s3cret")
    line.document["api"] = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "tokens": tokens}
    with line.served() as service:
        yield service


def bearer(role):
    return {} if role is None else {"authorization": f"Bearer {role}-s3cret"}


@pytest.fixture
def unchanged(line, service):
    """What a call may have changed: all rows, and the line file."""

    def now():
        with closing(sqlite3.connect(line.folder / "state" / "results.db")) as database:
            rows = list(database.iterdump())
        return rows, (line.folder / "line.yaml").read_bytes()

    before = now()
    yield
    assert now() == before


def routes_of(service):
    return [(method, route) for route in service.web.door.routes() for method in sorted(route.methods or ())]


def path_of(route):
    return route.path_format.format(**dict.fromkeys(route.param_convertors, "1"))


class TestHttp:
    @pytest.mark.parametrize(("role", "refused"), [("read", 403), (None, 401)])
    def test_http_route_lets_no_caller_without_the_role_change_anything(self, service, unchanged, role, refused):
        (address,), tried = service.web.addresses, set()
        for method, route in routes_of(service):
            least = route.endpoint.rule.least
            status, *_ = asked(address, path_of(route), method, {}, content_type="application/json", **bearer(role))
            is_refused = least > (Role.READ if role else Role.INSPECT)
            assert (status == refused) == is_refused or (method, route.path, status) == ("POST", "/api/session", 401)
            tried |= {route.path} if is_refused else set()
        assert {"/api/reviews", "/api/reload", "/api/trigger", "/api/line/check", "/api/experts/promote"} <= tried
        assert any(path.endswith("/load") for path in tried)

    def test_http_route_without_an_action_stores_no_inspection_of_a_reader(self, service, unchanged):
        image, board = triton.InferInput("IMAGE", [1], "BYTES"), triton.InferInput("BOARD", [1], "BYTES")
        image.set_data_from_numpy(np.array([picture()], dtype=np.object_))
        board.set_data_from_numpy(np.array([b"B1"], dtype=np.object_))
        with closing(triton.InferenceServerClient(service.web.addresses[0])) as client:
            assert client.infer("c0", [image], headers=bearer("read")).as_numpy("VERDICT")[0] == b"OK"
            with pytest.raises(triton.InferenceServerException, match="needs the role inspect"):
                client.infer("c0", [image, board], headers=bearer("read"))

    def test_http_caller_with_the_role_is_not_refused(self, service):
        (address,) = service.web.addresses
        for method, route in routes_of(service):
            rule = route.endpoint.rule
            if rule.least > Role.READ and rule.action not in ("reload", "promote"):
                role = rule.least.name.lower()
                status, *_ = asked(address, path_of(route), method, {}, content_type="application/json", **bearer(role))
                assert status not in (401, 403, 500), route.path
        told = json.loads(asked(address, "/api/audit", **bearer("admin"))[2])
        assert {entry["who"] for entry in told["entries"]} <= {"operate", "admin"}

    def test_tokens_of_the_line_file_are_served_after_a_reload(self, service, line):
        (address,) = service.web.addresses
        tokens = line.document["api"]["tokens"]
        tokens["shift-lead"] = {"role": "operate", "file": "operate.token"}
        del tokens["operate"], tokens["read"]
        line.write()
        told = json.loads(
            asked(address, "/api/reload", "POST", {}, content_type="application/json", **bearer("admin"))[2]
        )
        assert (told["is_applied"], told["needs_restart"]) == (True, [])
        told = json.loads(asked(address, "/api/session", **bearer("operate"))[2])
        assert told == {"name": "shift-lead", "role": "operate"}
        assert asked(address, "/api/session", **bearer("read"))[0] == 401


def methods():
    for described in (inspection_pb2, inference_pb2):
        for service in described.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def status_of(channel, method, role, message=b""):
    call = channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}")
    metadata = tuple(bearer(role).items())
    answers = call(iter([message]), timeout=0.2 if method.name in FOREVER else DEADLINE_S, metadata=metadata)
    try:
        for answer in answers:
            if method.name == "InspectStream":
                told = inspection_pb2.StreamAnswer.FromString(answer)
                return told.refused.reason if told.HasField("refused") else "OK"
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def message_of(method, order):
    sent = inspection_pb2.StreamOrder(id="1", order=order) if method == "InspectStream" else order
    return sent.SerializeToString()


class TestGrpc:
    @pytest.mark.parametrize(("role", "refused"), [("read", "PERMISSION_DENIED"), (None, "UNAUTHENTICATED")])
    def test_grpc_method_lets_no_caller_without_the_role_change_anything(self, service, unchanged, role, refused):
        tried = set()
        with grpc.insecure_channel(service.api.addresses[0]) as channel:
            for method in methods():
                is_refused = method.name in CHANGING
                assert (status_of(channel, method, role) == refused) == is_refused, method.name
                tried |= {method.name} if is_refused else set()
        assert tried == CHANGING.keys()

    def test_grpc_inspection_of_a_reader_is_not_stored(self, service, unchanged):
        order = inspection_pb2.InspectRequest(file=picture(), component="c0")
        question = inspection_pb2.InspectRequest(file=picture(), component="c0", is_question=True)
        by_name = {method.name: method for method in methods()}
        with grpc.insecure_channel(service.api.addresses[0]) as channel:
            for name in ("Inspect", "InspectStream"):
                asked_, stored = (
                    status_of(channel, by_name[name], "read", message_of(name, one)) for one in (question, order)
                )
                assert (asked_, stored in ("PERMISSION_DENIED", "FORBIDDEN")) == ("OK", True)

    def test_grpc_caller_with_the_role_is_not_refused_and_is_audited(self, service, line):
        by_name = {method.name: method for method in methods()}
        load = inference_pb2.RepositoryModelLoadRequest(model_name="c0").SerializeToString()
        with grpc.insecure_channel(service.api.addresses[0]) as channel:
            assert status_of(channel, by_name["Trigger"], "operate") == "NOT_FOUND"
            assert status_of(channel, by_name["RepositoryModelLoad"], "operate") == "PERMISSION_DENIED"
            assert status_of(channel, by_name["RepositoryModelLoad"], "admin", load) == "OK"
            assert status_of(channel, by_name["Reload"], "admin") == "OK"
            line.document["nonsense"] = 1
            line.write()
            assert status_of(channel, by_name["Reload"], "admin") == "OK"

        def entries():
            return json.loads(asked(service.web.addresses[0], "/api/audit", **bearer("operate"))[2])["entries"]

        until(lambda: len(entries()) == 4)  # once they are committed
        ends = [
            (entry["who"], entry["action"], entry["subject"], entry["outcome"][:11]) for entry in reversed(entries())
        ]
        assert ends == [
            ("operate", "trigger", "", "NOT_FOUND: "), ("admin", "load model", "c0", "done"),
            ("admin", "reload", "", "done"), ("admin", "reload", "", "not applied"),
        ]  # fmt: skip
