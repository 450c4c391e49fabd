"""A line file that is read anew while its line is served: nothing that was accepted is lost, nothing waits."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing, contextmanager

import onnx
import pytest
import torch
import yaml
from safetensors.torch import load_file

from experts.checkpoints.importing import bring
from experts.errors import OrderRefused
from experts.expert import Verdict
from tests.experts.conftest import ExpertFiles
from tests.lines import order as order_of

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


def asked(service, caller, *orders):
    callers = [caller() for _ in orders]
    for order, each in zip(orders, callers, strict=True):
        service.desk.order(order, each)
    return [each.wait() for each in callers]


@contextmanager
def full_disk(line):
    """Nothing can be committed meanwhile."""
    with closing(sqlite3.connect(line.folder / "state" / "results.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def rewrite(line):
    (line.folder / "line.yaml").write_text(yaml.safe_dump(line.document))


def add_expert(line, number):
    line.document["experts"][f"cls/f{number}"] = line._expert(number)
    line.document["routes"][f"c{number}"] = [{"expert": f"cls/f{number}", "pass": ["ok"]}]


def test_an_added_expert_and_its_route_are_served_at_once(desk_line, caller, png):
    with desk_line.served() as service:
        with pytest.raises(OrderRefused, match="no route"):
            service.desk.order(order_of(png(), component="c2"), caller())
        add_expert(desk_line, 2)
        rewrite(desk_line)
        done = service.desk.reload()
        assert (done.is_applied, done.added, done.replaced, done.removed) == (True, ("cls/f2",), (), ())
        ((part,),) = asked(service, caller, order_of(png(), component="c2"))
        assert (part.verdict, part.experts) == (OK, ("cls/f2",))


def test_a_replaced_expert_answers_with_its_new_weights_under_its_old_name(desk_line, caller, png):
    with desk_line.served() as service:
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK
        for number, label in enumerate(["bad", "ok", "bad"]):
            desk_line.fake(0, label=label, weight_bytes=1_000_000 + number)
            done = service.desk.reload()
            assert (done.added, done.replaced, done.removed) == ((), ("cls/f0",), ())
            ((part,),) = asked(service, caller, order_of(png(), component="c0"))
            assert (part.label, part.experts) == (label, ("cls/f0",))
            ((alone,),) = asked(service, caller, order_of(png(), expert="cls/f0", is_kept=False))
            assert (alone.label, alone.experts) == (label, ("cls/f0",))
        resident = {name for pool in service.desk.status().pools for name in pool.experts}
        assert len(resident) <= 2  # those that were replaced have left
    assert {row.result.experts for row in desk_line.results.query()} == {("cls/f0",)}


def test_an_agent_does_not_grow_however_often_its_line_is_changed(desk_line, caller, png, wait_until_so):
    """Experts that are replaced, quarantined, removed and added again."""

    def sizes(service):
        agent, loop = service.agent, service.agent.loop
        known = loop._copies, loop._experts, loop._workshop.transfers._copies, service._inspector._models
        return [
            *map(len, (agent.copies, agent.packed, agent.retired, agent.setup.graph.experts, agent.templates.held)),
            *map(len, (agent.heard, agent.experts, loop.statistics().engine.quarantined, *known)),
        ]

    def change(service, number):
        desk_line.fake(0, label="ok", weight_bytes=1_000_000 + number)
        (desk_line.folder / "f1.yaml").write_text("{" * (number % 3 + 1))
        if number % 2:
            add_expert(desk_line, 2)
        else:
            del desk_line.document["experts"]["cls/f2"], desk_line.document["routes"]["c2"]
        rewrite(desk_line)
        assert service.desk.reload().is_applied
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK
        wait_until_so(lambda: service.agent.loop.wait_until_idle(0.0))

    add_expert(desk_line, 2)
    with desk_line.served() as service:
        found = []
        for number in range(16):
            change(service, number)
            found.append(sizes(service))
        assert found[4:8] == found[12:16]


def test_a_removed_expert_finishes_what_it_was_asked_and_is_asked_no_more(desk_line, caller, png, wait_until_so):
    desk_line.fake(1, B_s=0.1)
    with desk_line.served() as service:
        callers = [caller() for _ in range(20)]
        for each in callers:
            service.desk.order(order_of(png(), component="c1"), each)
        wait_until_so(lambda: service.statistics().requests_in_flight + service.judged >= 20)  # the agent has them
        del desk_line.document["experts"]["cls/f1"], desk_line.document["routes"]["c1"]
        del desk_line.document["boards"]
        rewrite(desk_line)
        done = service.desk.reload()
        assert (done.is_applied, done.problems, done.removed) == (True, (), ("cls/f1",))
        assert [each.wait()[0].verdict for each in callers] == [OK] * 20
        with pytest.raises(OrderRefused, match="no route"):
            service.desk.order(order_of(png(), component="c1"), caller())
        assert [model.name for model in service.desk.models()] == ["c0", "expert:cls/f0"]


def test_what_was_ordered_and_is_durable_only_after_its_route_went_is_unknown_and_says_so(desk_line, caller, png):
    """It was taken, so it has one end, which is stored: the agent does not take back what it said."""
    with desk_line.served() as service:
        late = caller()
        with full_disk(desk_line):
            service.desk.order(order_of(png(), component="c1", key="late"), late)
            del desk_line.document["experts"]["cls/f1"], desk_line.document["routes"]["c1"]
            del desk_line.document["boards"]
            rewrite(desk_line)
            assert service.desk.reload().is_applied
        (part,) = late.wait()
        assert (part.verdict, part.seq) == (UNKNOWN, 1)
        assert part.reason == "no route for component 'c1'"
    assert desk_line.unfinished == []


def test_what_is_under_way_is_judged_by_the_route_that_it_came_under(desk_line, caller, png, wait_until_so):
    for number in range(2):
        desk_line.fake(number, B_s=0.1)
    with desk_line.served() as service:
        callers = [caller() for _ in range(10)]
        for each in callers:
            service.desk.order(order_of(png(), component="c0"), each)
        wait_until_so(lambda: service.statistics().requests_in_flight + service.judged >= 10)  # the agent has them
        desk_line.document["routes"]["c0"] = [{"expert": "cls/f0", "pass": ["bad"]}]
        rewrite(desk_line)
        assert service.desk.reload().is_applied
        assert [each.wait()[0].verdict for each in callers] == [OK] * 10
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is NG


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
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK


def test_what_cannot_fit_is_refused_and_the_old_line_goes_on(desk_line, caller, png):
    with desk_line.served() as service:
        add_expert(desk_line, 2)
        desk_line.fake(2, weight_bytes=50_000_000)
        rewrite(desk_line)
        done = service.desk.reload()
        assert not done.is_applied
        assert "cls/f2" in done.problems[0]
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK


def test_keys_that_wait_for_a_restart_are_named(desk_line):
    with desk_line.served() as service:
        desk_line.document["memory"] = {"host": "30MiB", "workspace": "10MiB"}
        desk_line.document["policy"] = "paper"
        rewrite(desk_line)
        assert service.desk.reload().needs_restart == ("memory", "policy")


def test_new_boards_are_judged_by_their_new_components(desk_line, caller, png):
    with desk_line.served() as service:
        asked(service, caller, order_of(png(), component="c0", board="B1", ref="R1"))
        desk_line.document["boards"] = {"main": {"components": {"c0": 1}, "takt_s": 3600}}
        rewrite(desk_line)
        assert service.desk.reload().is_applied
        asked(service, caller, order_of(png(), component="c0", board="B2", ref="R1"))
        (board,) = service.desk.boards("B2")
        assert board.verdict is OK
        (board,) = service.desk.boards("B1")
        assert (board.verdict, dict(board.missing)) == (None, {"c1": 1})


def test_an_open_board_whose_type_goes_is_judged_by_what_it_began_with(desk_line, caller, png, wait_until_so):
    desk_line.fake(1, B_s=0.3)
    with desk_line.served() as service:
        asked(service, caller, order_of(png(), component="c0", board="B1", ref="R1"))
        last = caller()
        service.desk.order(order_of(png(), component="c1", board="B1", ref="R2"), last)
        wait_until_so(lambda: any(queue.running for queue in service.desk.status().queues))
        boards = desk_line.document.pop("boards")
        rewrite(desk_line)
        assert service.desk.reload().is_applied
        assert [dict(board.missing) for board in service.desk.boards("B1")] == [{"c1": 1}]
        assert last.wait()[0].verdict is OK
        wait_until_so(lambda: len(desk_line.results.boards()) == 1)
        asked(service, caller, order_of(png(), component="c0", board="B2", ref="R1"))
        assert service.desk.boards("B2") == []  # none begins any more
    desk_line.document["boards"] = boards
    assert [(row.board.serial, row.board.verdict) for row in desk_line.results.boards()] == [("B1", OK)]


def test_an_expert_that_is_broken_after_a_reload_is_unknown_and_the_others_go_on(desk_line, caller, png):
    with desk_line.served() as service:
        desk_line.fake(1, weight_bytes="many")
        assert service.desk.reload().is_applied
        (broken,), (well,) = asked(service, caller, order_of(png(), component="c1"), order_of(png(), component="c0"))
        assert (broken.verdict, well.verdict) == (UNKNOWN, OK)
        assert "+" not in broken.reason


@pytest.mark.parametrize("suffix", [".safetensors", ".onnx"])
def test_weights_with_labels_in_another_order_are_refused_and_those_of_before_go_on(
    desk_line, caller, png, tmp_path, suffix
):
    """Trained again with its folders in another order: each label would be told for another."""
    order, files = ("ok", "bad", "bent"), ExpertFiles(tmp_path)
    expert = (
        files.onnx("cls/x", labels=order)
        if suffix == ".onnx"
        else files.classifier("cls/x", "squeezenet1_1", labels=order)
    )
    state = {} if suffix == ".onnx" else load_file(expert.weights)

    def bring_with(labels):
        if suffix == ".onnx":
            model = onnx.load_model(expert.weights)
            del model.metadata_props[:]
            model.metadata_props.add(key="names", value=str(dict(enumerate(labels))))
            onnx.save_model(model, expert.weights)
        else:
            torch.save({"state_dict": state, "classes": list(labels)}, tmp_path / "trained.pt")
            bring(tmp_path / "trained.pt", expert.weights)

    bring_with(order)
    desk_line.document["experts"]["cls/x"] = {
        "architecture": expert.architecture, "weights": str(expert.weights), "labels": list(order),
        "input": {"size": [expert.pixels.height, expert.pixels.width]},
    }  # fmt: skip
    desk_line.document["routes"]["cx"] = [{"expert": "cls/x", "pass": ["ok"]}]
    desk_line.document["memory"]["host"] = "600MiB"
    with desk_line.served() as service:
        before = asked(service, caller, order_of(png(), component="cx"))[0][0]
        assert before.reason is None
        bring_with(("bad", "ok", "bent"))
        done = service.desk.reload()
        assert not done.is_applied
        (problem,) = done.problems
        assert f"{expert.weights} has the labels bad, ok, bent, and the line ok, bad, bent" in problem
        assert "line.yaml" in problem
        after = asked(service, caller, order_of(png(), component="cx"))[0][0]
        assert (after.verdict, after.label) == (before.verdict, before.label)
        desk_line.document["experts"]["cls/x"]["labels"] = ["bad", "ok", "bent"]
        rewrite(desk_line)
        assert service.desk.reload().replaced == ("cls/x",)


def test_images_that_come_while_the_line_changes_over_and_over_are_all_judged(desk_line, caller, png):
    with desk_line.served() as service:
        callers: list = []
        stop = threading.Event()

        def send():
            while not stop.is_set() and len(callers) < 400:
                each = caller()
                service.desk.order(order_of(png(), component="c0"), each)
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
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].label == "bad"


def test_what_has_left_the_line_takes_no_room_and_no_file_any_more(desk_line, caller, png):
    """Of what memory holds, 10 MiB are for experts: one of 8 MB would not fit beside a pinned one of 4 MB."""
    desk_line.fake(0, weight_bytes=8_000_000)
    with desk_line.served() as service:
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK
        desk_line.fake(0, weight_bytes=1_000_000)
        assert service.desk.reload().replaced == ("cls/f0",)
        desk_line.fake(1, weight_bytes=4_000_000)
        desk_line.document["experts"]["cls/f1"]["pin"] = True
        rewrite(desk_line)
        done = service.desk.reload()
        assert (done.is_applied, done.problems) == (True, ())
        assert asked(service, caller, order_of(png(), component="c1"))[0][0].verdict is OK
        assert service.desk.reload().is_applied
        packed_bytes = [file.stat().st_size for file in desk_line.config.packed_folder.rglob("*") if file.is_file()]
        assert max(packed_bytes) < 8_000_000


def test_a_drive_that_takes_nothing_refuses_the_new_line_and_ends_nothing(desk_line, caller, png):
    with desk_line.served() as service:
        add_expert(desk_line, 2)
        rewrite(desk_line)
        manifests = desk_line.config.packed_folder / "manifests"
        manifests.rename(manifests.with_name("elsewhere"))
        manifests.write_text("not a folder")
        done = service.desk.reload()
        assert not done.is_applied
        assert "cannot be prepared" in done.problems[0]
        assert asked(service, caller, order_of(png(), component="c0"))[0][0].verdict is OK
        manifests.unlink()
        manifests.with_name("elsewhere").rename(manifests)
        assert service.desk.reload().added == ("cls/f2",)
