"""Each Python snippet of docs/api.md about gRPC, run as it stands there but for the port."""

import re
import shutil
import threading
from pathlib import Path

import grpc
import pytest

from agent.doors.grpc.refusals import STATUS
from tests.agent.doors.fake_desk import MAP
from tests.authority import Authority
from tests.lines import order as order_of

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ENCRYPTED = [snippet for snippet in SNIPPETS if "secure_channel(" in snippet and "insecure" not in snippet]
WATCHING = [snippet for snippet in SNIPPETS if "WatchResults" in snippet]
PLAIN = [snippet for snippet in SNIPPETS if "8461" in snippet and snippet not in ENCRYPTED + WATCHING]


def run(snippet, server, **names):
    tcp = next(address for address in server.addresses if not address.startswith("unix:"))
    exec(snippet.replace("127.0.0.1:8461", tcp), names)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("image.png").write_bytes(b"an NG one")


def test_examples_of_the_page_inspect_images_and_print_a_refusal(server, desk, capsys):
    for snippet in PLAIN:
        run(snippet, server)
    assert capsys.readouterr().out.splitlines() == [
        "VERDICT_NG bad 0.75 ",
        "NG bad 0.75",
        "NOT_FOUND NOT_FOUND None no route for 'no-such-one', no expert None",
    ]
    assert [(part.subject.key[:10], part.subject.board, part.subject.ref) for part in desk.results] == [
        ("B1042/R17/", "B1042", "R17")
    ] * 2
    assert len({part.subject.key for part in desk.results}) == 2


def test_example_of_the_page_follows_results_until_the_agent_stops(server, desk):
    run(PLAIN[0], server)
    stopping = threading.Thread(target=lambda: desk.wait_for(lambda desk: desk.watchers) or server.stop(0.0))
    stopping.start()
    with pytest.raises(grpc.RpcError) as error:
        run(WATCHING[0], server)
    stopping.join()
    server.addresses = ()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_example_of_the_page_follows_anomaly_maps(server, desk):
    desk.commit(desk._part(order_of(b"strange", component="solder"), "solder"))
    told = []

    def tell(*words):
        told.append(words)
        server.stop(0.0)

    with pytest.raises(grpc.RpcError):
        run(WATCHING[1], server, print=tell)
    server.addresses = ()
    assert told == [(1, "look/solder", 3.5, 1.25, len(MAP), "bytes")]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_example_of_the_page_connects_from_another_machine_over_tls(serve, tmp_path, capsys):
    folder = tmp_path / "tls"
    folder.mkdir()
    ours = Authority(folder, "ours")
    ours.sign("box")
    ours.sign("caller")
    (folder / "token").write_text("s3cret\n")
    tls = {"certificate": folder / "box.pem", "key": folder / "box.key", "client_ca": folder / "ours.pem"}
    run(ENCRYPTED[0], serve(tls=tls, token={"file": folder / "token"}))
    assert capsys.readouterr().out == "test 3726 s\n"


def test_every_refusal_reason_is_on_the_page_with_its_grpc_status():
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", PAGE, re.MULTILINE))
    assert rows == {str(reason): status.name for reason, status in STATUS.items()} | {"INTERNAL": "INTERNAL"}
