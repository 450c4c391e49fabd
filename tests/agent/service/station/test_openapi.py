"""The OpenAPI document of a running line: what it promises is kept, whatever is sent."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi import checks
from typer.testing import CliRunner

from agent.service.station.served import OPERATIONS
from agent.web.texts import described
from coserve import app
from tests.agent.service.fake_line import FakeLine, asked, picture
from tests.agent.service.station.test_station import Web, with_door
from tests.lines import order as order_of

CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_schema_conformance, checks.negative_data_rejection,
]  # fmt: skip
ALL = (*OPERATIONS, *described.OPERATIONS)
QUICK = settings(
    max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
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


def keeps_its_promise(api, operation, examples):
    service, schema = api
    described = schema[operation.path][operation.method]
    where = {"base_url": f"http://{service.web.addresses[0]}", "headers": {"authorization": "Bearer secret-of-master"}}
    takes_nothing = not operation.asked.model_fields and operation.body is None
    for mode in (GenerationMode.POSITIVE,) if takes_nothing else GenerationMode:

        @examples
        @given(case=described.as_strategy(mode))
        def sent(case):
            case.call_and_validate(checks=CHECKS, **where)

        sent()


def named(operation):
    return f"{operation.method} {operation.path}"


@pytest.mark.parametrize("operation", ALL, ids=named)
def test_what_the_document_promises_is_kept(api, operation):
    keeps_its_promise(api, operation, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ALL, ids=named)
def test_what_the_document_promises_is_kept_at_length(api, operation):
    keeps_its_promise(api, operation, THOROUGH)


def test_every_operation_is_in_the_document(api):
    _, schema = api
    told = {f"{one.ok().method.upper()} {one.ok().path}" for one in schema.get_all_operations()}
    assert {named(operation) for operation in ALL} == told


def test_the_command_prints_the_document_that_is_served(api):
    service, _ = api
    printed = CliRunner().invoke(app, ["config", "openapi"])
    assert json.loads(printed.stdout) == Web(service).json("/api/openapi.json")
