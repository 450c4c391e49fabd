"""The OpenAPI document of a running line: what it promises is kept, whatever is sent."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi import checks

from agent.doors.http.texts import described
from agent.service.station.served import OPERATIONS
from tests.agent.service.fake_line import FakeLine, asked, picture
from tests.agent.service.station.test_station import Web, with_door
from tests.commands import coserve
from tests.lines import order as order_of

CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_schema_conformance, checks.negative_data_rejection,
]  # fmt: skip
ALL = (*OPERATIONS, *described.OPERATIONS)
QUICK = settings(
    max_examples=5, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
THOROUGH = settings(QUICK, max_examples=150)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """A served line with a result of each kind, and its document, loaded."""
    load_all_checks()
    line = with_door(FakeLine(tmp_path_factory.mktemp("api")))
    line.fake(0, label="bad")
    line.document["records"] = {"images": "all"}
    with line.served() as service:
        asked(service, *(order_of(picture(), component=f"c{each}", board="B1", ref=f"R{each}") for each in (0, 1)))
        web = Web(service, "master")
        yield service, schemathesis.openapi.from_dict(web.json("/api/openapi.json"))


def at(service):
    return {"base_url": f"http://{service.web.addresses[0]}", "headers": {"authorization": "Bearer secret-of-master"}}


def keeps_its_promise(api, operation, examples):
    service, schema = api
    described = schema[operation.path][operation.method]
    takes_nothing = not operation.asked.model_fields and operation.body is None
    for mode in (GenerationMode.POSITIVE,) if takes_nothing else GenerationMode:

        @examples
        @given(case=described.as_strategy(mode))
        def sent(case):
            case.call_and_validate(checks=CHECKS, **at(service))

        sent()


def named(operation):
    return f"{operation.method} {operation.path}"


@pytest.mark.parametrize("operation", ALL, ids=named)
def test_each_operation_answers_by_the_openapi_document(api, operation):
    keeps_its_promise(api, operation, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ALL, ids=named)
def test_each_operation_answers_by_the_openapi_document_in_a_long_search(api, operation):
    keeps_its_promise(api, operation, THOROUGH)


def test_text_operations_answer_by_the_openapi_document(text_line):
    with with_door(text_line).served() as service:
        schema = schemathesis.openapi.from_dict(Web(service, "master").json("/api/openapi.json"))
        bodies = {
            "/v1/completions": {"prompt": "the quick", "max_tokens": 4, "logprobs": 2, "coserve": {}},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        }
        for path, more in bodies.items():
            described = schema[path]["POST"]
            for streams in (False, True):
                body = {"model": "llm/code", "stream": streams, **more}
                case = described.Case(body=body, media_type="application/json")
                assert case.call_and_validate(checks=CHECKS, **at(service)).status_code == 200

            @QUICK
            @given(case=described.as_strategy(GenerationMode.POSITIVE))
            def sent(case):
                case.body |= {"model": "llm/code", "max_tokens": 4}
                case.call_and_validate(checks=CHECKS, **at(service))

            sent()
        named_model = schema["/v1/models/{name}"]["GET"].Case(path_parameters={"name": "llm/code"})
        assert named_model.call_and_validate(checks=CHECKS, **at(service)).status_code == 200
        listed = schema["/v1/models"]["GET"].Case()
        assert listed.call_and_validate(checks=CHECKS, **at(service)).json()["data"]


def test_every_operation_is_in_the_document(api):
    _, schema = api
    told = {f"{one.ok().method.upper()} {one.ok().path}" for one in schema.get_all_operations()}
    assert {named(operation) for operation in ALL} == told


def test_openapi_command_prints_the_served_document(api):
    service, _ = api
    printed = coserve("config", "openapi")
    assert json.loads(printed.stdout) == Web(service).json("/api/openapi.json")
