"""The command line's caller: answers in the desk's nouns, errors in words."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from agent.doors.grpc.client import AgentClient
from agent.faults.errors import AgentUnreachable, OrderRefused, Reason
from experts.expert import Verdict


def test_images_are_judged_in_order_and_not_stored(client, desk):
    images = [b"NG" if number % 3 else b"x" for number in range(100)]
    verdicts = [part.verdict for part in client.inspect(images, "resistor")]
    assert verdicts == [Verdict.NG if number % 3 else Verdict.OK for number in range(100)]
    assert desk.results == []


def test_image_refused_by_a_full_queue_is_sent_again(client, desk):
    desk.most, desk.holds = 1, True
    timer = threading.Thread(target=lambda: desk.wait_for(lambda desk: desk.under_way) or desk.release())
    timer.start()
    assert [part.verdict for part in client.inspect([b"x"] * 5, "resistor")] == [Verdict.OK] * 5
    timer.join()


def test_client_returns_the_status_and_raises_refusals_of_the_desk(client, desk):
    assert client.status() == desk.status()
    with pytest.raises(OrderRefused) as refused:
        list(client.inspect([b"x"], "nobody"))
    assert refused.value.reason is Reason.NOT_FOUND


def test_unreachable_agent_is_an_error_that_asks_whether_it_runs(tmp_path):
    for address in (f"unix:{tmp_path}/a.sock", "127.0.0.1:1"):
        with AgentClient(address) as client, pytest.raises(AgentUnreachable) as error:
            client.status()
        assert str(error.value).startswith(f"{address}: no answer - is the agent running")


def test_forbidden_socket_is_an_error_that_names_the_permission(closed_socket):
    with AgentClient(closed_socket) as client, pytest.raises(AgentUnreachable, match="this user may not open"):
        client.status()


def test_server_other_than_an_agent_is_reported_as_such():
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with AgentClient(f"127.0.0.1:{port}") as client, pytest.raises(AgentUnreachable, match="not an agent"):
            client.status()
        server.stop(0).wait()
