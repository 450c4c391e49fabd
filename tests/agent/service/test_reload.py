"""A line file that is read anew while its line is served: nothing that was accepted is lost, nothing waits."""

from __future__ import annotations

import threading

import pytest
import yaml

from agent.api.calls.desk import Order
from experts.errors import OrderRefused
from experts.expert import Verdict

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


def asked(service, caller, *orders):
    callers = [caller() for _ in orders]
    for order, each in zip(orders, callers, strict=True):
        service.desk.order(order, each)
    return [each.wait() for each in callers]


def rewrite(line):
    (line.folder / "line.yaml").write_text(yaml.safe_dump(line.document))


def add_expert(line, number):
    line.document["experts"][f"cls/f{number}"] = line._expert(number)
    line.document["routes"][f"c{number}"] = [{"expert": f"cls/f{number}", "pass": ["ok"]}]


def test_an_added_expert_and_its_route_are_served_at_once(desk_line, caller, png):
    with desk_line.served() as service:
        with pytest.raises(OrderRefused, match="no route"):
            service.desk.order(Order(png(), component="c2"), caller())
        add_expert(desk_line, 2)
        rewrite(desk_line)
        done = service.desk.reload()
        assert (done.is_applied, done.added, done.replaced, done.removed) == (True, ("cls/f2",), (), ())
        ((part,),) = asked(service, caller, Order(png(), component="c2"))
        assert (part.verdict, part.experts) == (OK, ("cls/f2",))


def test_a_replaced_expert_answers_with_its_new_weights_under_its_old_name(desk_line, caller, png):
    with desk_line.served() as service:
        assert asked(service, caller, Order(png(), component="c0"))[0][0].verdict is OK
        for number, label in enumerate(["bad", "ok", "bad"]):
            desk_line.fake(0, label=label, weight_bytes=1_000_000 + number)
            done = service.desk.reload()
            assert (done.added, done.replaced, done.removed) == ((), ("cls/f0",), ())
            ((part,),) = asked(service, caller, Order(png(), component="c0"))
            assert (part.label, part.experts) == (label, ("cls/f0",))
            ((alone,),) = asked(service, caller, Order(png(), expert="cls/f0", is_kept=False))
            assert (alone.label, alone.experts) == (label, ("cls/f0",))
        resident = {name for pool in service.desk.status().pools for name in pool.experts}
        assert len(resident) <= 2  # those that were replaced have left
    assert {row.result.experts for row in desk_line.results.query()} == {("cls/f0",)}


def test_a_removed_expert_finishes_what_it_was_asked_and_is_asked_no_more(desk_line, caller, png, wait_until_so):
    desk_line.fake(1, B_s=0.1)
    with desk_line.served() as service:
        callers = [caller() for _ in range(20)]
        for each in callers:
            service.desk.order(Order(png(), component="c1"), each)
        wait_until_so(lambda: service.statistics().requests_in_flight + service.judged >= 20)  # the agent has them
        del desk_line.document["experts"]["cls/f1"], desk_line.document["routes"]["c1"]
        del desk_line.document["boards"]
        rewrite(desk_line)
        done = service.desk.reload()
        assert (done.is_applied, done.problems, done.removed) == (True, (), ("cls/f1",))
        assert [each.wait()[0].verdict for each in callers] == [OK] * 20
        with pytest.raises(OrderRefused, match="no route"):
            service.desk.order(Order(png(), component="c1"), caller())
        assert [model.name for model in service.desk.models()] == ["c0", "expert:cls/f0"]


def test_what_is_under_way_is_judged_by_the_route_that_it_came_under(desk_line, caller, png, wait_until_so):
    for number in range(2):
        desk_line.fake(number, B_s=0.1)
    with desk_line.served() as service:
        callers = [caller() for _ in range(10)]
        for each in callers:
            service.desk.order(Order(png(), component="c0"), each)
        wait_until_so(lambda: service.statistics().requests_in_flight + service.judged >= 10)  # the agent has them
        desk_line.document["routes"]["c0"] = [{"expert": "cls/f0", "pass": ["bad"]}]
        rewrite(desk_line)
        assert service.desk.reload().is_applied
        assert [each.wait()[0].verdict for each in callers] == [OK] * 10
        assert asked(service, caller, Order(png(), component="c0"))[0][0].verdict is NG


def test_a_line_file_with_a_mistake_changes_nothing_and_says_where_it_is(desk_line, caller, png):
    """AC33."""
    with desk_line.served() as service:
        (desk_line.folder / "line.yaml").write_text("line: [")
        done = service.desk.reload()
        assert not done.is_applied
        assert "line.yaml:2:1: syntax" in done.problems[0]
        desk_line.document["routes"]["c9"] = [{"expert": "cls/none", "pass": ["ok"]}]
        rewrite(desk_line)
        done = service.desk.reload()
        assert not done.is_applied
        assert any("cls/none" in problem for problem in done.problems)
        assert asked(service, caller, Order(png(), component="c0"))[0][0].verdict is OK


def test_what_cannot_fit_is_refused_and_the_old_line_goes_on(desk_line, caller, png):
    with desk_line.served() as service:
        add_expert(desk_line, 2)
        desk_line.fake(2, weight_bytes=50_000_000)
        rewrite(desk_line)
        done = service.desk.reload()
        assert not done.is_applied
        assert "cls/f2" in done.problems[0]
        assert asked(service, caller, Order(png(), component="c0"))[0][0].verdict is OK


def test_keys_that_wait_for_a_restart_are_named(desk_line):
    with desk_line.served() as service:
        desk_line.document["memory"] = {"host": "30MiB", "workspace": "10MiB"}
        desk_line.document["policy"] = "paper"
        rewrite(desk_line)
        assert service.desk.reload().needs_restart == ("memory", "policy")


def test_new_boards_are_judged_by_their_new_components(desk_line, caller, png):
    with desk_line.served() as service:
        asked(service, caller, Order(png(), component="c0", board="B1", ref="R1"))
        desk_line.document["boards"] = {"main": {"components": {"c0": 1}, "takt_s": 3600}}
        rewrite(desk_line)
        assert service.desk.reload().is_applied
        asked(service, caller, Order(png(), component="c0", board="B2", ref="R1"))
        (board,) = service.desk.boards("B2")
        assert board.verdict is OK
        (board,) = service.desk.boards("B1")
        assert (board.verdict, dict(board.missing)) == (None, {"c1": 1})


def test_an_expert_that_is_broken_after_a_reload_is_unknown_and_the_others_go_on(desk_line, caller, png):
    with desk_line.served() as service:
        desk_line.fake(1, weight_bytes="many")
        assert service.desk.reload().is_applied
        (broken,), (well,) = asked(service, caller, Order(png(), component="c1"), Order(png(), component="c0"))
        assert (broken.verdict, well.verdict) == (UNKNOWN, OK)
        assert "+" not in broken.reason


def test_images_that_come_while_the_line_changes_over_and_over_are_all_judged(desk_line, caller, png):
    with desk_line.served() as service:
        callers: list = []
        stop = threading.Event()

        def send():
            while not stop.is_set() and len(callers) < 400:
                each = caller()
                service.desk.order(Order(png(), component="c0"), each)
                callers.append(each)

        sender = threading.Thread(target=send)
        sender.start()
        for number in range(5):
            desk_line.fake(0, weight_bytes=1_000_000 + number)
            assert service.desk.reload().replaced == (("cls/f0",) if number else ())
        stop.set()
        sender.join()
        assert {each.wait()[0].verdict for each in callers} == {OK}
        assert service.judged == len(callers)


def test_after_a_restart_the_new_line_is_served(desk_line, caller, png):
    with desk_line.served() as service:
        desk_line.fake(0, label="bad", weight_bytes=1_000_001)
        service.desk.reload()
    with desk_line.served() as service:
        assert asked(service, caller, Order(png(), component="c0"))[0][0].label == "bad"
