"""A line file that is read anew while its line is served: nothing that was accepted is lost, nothing waits."""

import threading

import onnx
import pytest

from agent.faults.errors import OrderRefused
from experts.expert import Verdict
from tests.agent import line_files
from tests.agent.service.fake_line import PATTERN, Caller, asked, ordered, picture
from tests.experts.conftest import ExpertFiles
from tests.lines import order as order_of
from tests.waiting import until

OK, NG, UNKNOWN = Verdict.OK, Verdict.NG, Verdict.UNKNOWN


def part(component="c0", **about):
    return order_of(picture(), component=component, **about)


def reload(service, line):
    line.write()
    return service.desk.reload()


def verdict(service, component="c0"):
    return asked(service, part(component))[0][0].verdict


def test_reload_serves_an_added_expert_at_once_and_names_keys_that_need_a_restart(line):
    with line.served() as service:
        with pytest.raises(OrderRefused, match="no route"):
            service.desk.order(part("c2"), Caller())
        line.add_expert(2)
        line.document["memory"]["host"] = "30MiB"
        line.document["policy"] = "paper"
        done = reload(service, line)
        assert (done.is_applied, done.added, done.replaced, done.removed) == (True, ("cls/f2",), (), ())
        assert done.needs_restart == ("memory", "policy")
        ((told,),) = asked(service, part("c2"))
        assert (told.verdict, told.experts) == (OK, ("cls/f2",))


def test_replaced_expert_answers_with_its_new_weights_under_its_old_name(line):
    with line.served() as service:
        assert verdict(service) is OK
        for number, label in enumerate(["bad", "ok", "bad"]):
            line.fake(0, label=label, weight_bytes=1_000_000 + number)
            done = service.desk.reload()
            assert (done.added, done.replaced, done.removed) == ((), ("cls/f0",), ())
            answers = asked(service, part(), order_of(picture(), expert="cls/f0", is_kept=False))
            assert [(told.label, told.experts) for (told,) in answers] == [(label, ("cls/f0",))] * 2
        resident = {name for pool in service.desk.status().pools for name in pool.experts}
        assert len(resident) <= 2  # those that were replaced have left
    assert {row.experts for row in line.rows} == {("cls/f0",)}
    with line.served() as service:
        assert asked(service, part())[0][0].label == "bad"


def test_agent_does_not_grow_with_repeated_line_changes(line):
    def sizes(service):
        agent, loop = service.agent, service.agent.loop
        known = loop.served[0], loop.here._experts, loop.here.transfers._copies, service.inspector._models
        return [
            *map(len, (agent.copies, agent.packed, agent.retired, agent.setup.graph.experts, agent.templates.held)),
            *map(len, (agent.earlier_names, agent.experts, loop.statistics().engine.quarantined, *known)),
        ]

    def change(service, number):
        line.fake(0, label="ok", weight_bytes=1_000_000 + number)
        (line.folder / "f1.yaml").write_text("{" * (number % 3 + 1))
        if number % 2:
            line.add_expert(2)
        else:
            line.remove_expert(2)
        assert reload(service, line).is_applied
        assert verdict(service) is OK
        until(lambda: service.agent.loop.wait_until_idle(0.0))

    line.add_expert(2)
    with line.served() as service:
        found = []
        for number in range(16):
            change(service, number)
            found.append(sizes(service))
        assert found[4:8] == found[12:16]


def test_removed_expert_finishes_its_requests_and_gets_no_more(line):
    line.fake(1, B_s=0.1)
    with line.served() as service:
        callers = ordered(service, *[part("c1")] * 20)
        until(lambda: service.agent.loop.requests_in_flight + service.judged >= 20)  # the agent has them
        line.remove_expert(1)
        del line.document["boards"]
        done = reload(service, line)
        assert (done.is_applied, done.problems, done.removed) == (True, (), ("cls/f1",))
        assert [each.wait()[0].verdict for each in callers] == [OK] * 20
        with pytest.raises(OrderRefused, match="no route"):
            service.desk.order(part("c1"), Caller())
        assert [model.name for model in service.desk.models()] == ["c0", "expert:cls/f0"]


def test_order_made_durable_after_its_route_was_removed_is_unknown_with_the_reason(line):
    with line.served() as service:
        with line.full_disk():
            (late,) = ordered(service, part("c1", key="late"))
            line.remove_expert(1)
            del line.document["boards"]
            assert reload(service, line).is_applied
        (told,) = late.wait()
        assert (told.verdict, told.seq, told.reason) == (UNKNOWN, 1, "no route for component 'c1'")
    assert line.unfinished == []


def test_image_under_way_during_a_reload_is_judged_by_its_earlier_route(line):
    line.fake(0, B_s=0.1)
    with line.served() as service:
        callers = ordered(service, *[part()] * 10)
        until(lambda: service.agent.loop.requests_in_flight + service.judged >= 10)  # the agent has them
        line.document["routes"]["c0"] = [{"expert": "cls/f0", "pass": ["bad"]}]
        assert reload(service, line).is_applied
        assert [each.wait()[0].verdict for each in callers] == [OK] * 10
        assert verdict(service) is NG


def test_line_file_with_a_mistake_changes_nothing_and_the_reload_names_the_place(line):
    with line.served() as service:
        (line.folder / "line.yaml").write_text("line: [")
        done = [service.desk.reload()]
        line.document["routes"]["c9"] = [{"expert": "cls/none", "pass": ["ok"]}]
        done.append(reload(service, line))
        del line.document["routes"]["c9"]
        line.add_expert(2)
        line.fake(2, weight_bytes=50_000_000)
        done.append(reload(service, line))
        for each, told in zip(done, ("line.yaml:2:1: syntax", "cls/none", "cls/f2"), strict=True):
            assert (each.is_applied, told in " ".join(each.problems)) == (False, True)
        assert verdict(service) is OK


def test_weights_with_labels_in_another_order_are_refused_and_those_of_before_go_on(line, tmp_path):
    labels = ("ok", "bad", "bent")
    expert = ExpertFiles(tmp_path).onnx("cls/x", labels=labels)

    def train_with(*labels):
        model = onnx.load_model(expert.weights)
        del model.metadata_props[:]
        model.metadata_props.add(key="names", value=str(dict(enumerate(labels))))
        onnx.save_model(model, expert.weights)

    train_with(*labels)
    side = expert.pixels.height
    entry = line_files.expert(str(expert.weights), expert.architecture, side, labels=list(labels))
    line.document["experts"]["cls/x"] = entry
    line.document["routes"]["cx"] = line_files.route("cls/x")
    line.document["memory"]["host"] = "600MiB"
    with line.served() as service:
        ((before,),) = asked(service, part("cx"))
        assert before.reason is None
        train_with("bad", "ok", "bent")
        done = service.desk.reload()
        (problem,) = done.problems
        assert f"{expert.weights} has the labels bad, ok, bent, and the line ok, bad, bent" in problem
        assert (done.is_applied, "line.yaml" in problem) == (False, True)
        ((after,),) = asked(service, part("cx"))
        assert (after.verdict, after.label) == (before.verdict, before.label)
        entry["labels"] = ["bad", "ok", "bent"]
        assert reload(service, line).replaced == ("cls/x",)


def test_images_that_come_while_the_line_changes_over_and_over_are_all_judged(line):
    with line.served() as service:
        callers = []
        stop = threading.Event()

        def send():
            while not stop.is_set() and len(callers) < 400:
                callers.extend(ordered(service, part()))

        sender = threading.Thread(target=send)
        sender.start()
        for number in range(5):
            line.fake(0, weight_bytes=1_000_000 + number)
            assert service.desk.reload().replaced == (("cls/f0",) if number else ())
        stop.set()
        sender.join()
        assert {each.wait()[0].verdict for each in callers} == {OK}
        assert service.judged == len(callers)


def test_row_names_the_line_file_that_judged_it_also_after_a_reload(line):
    """An image that runs while the line file changes, and one that came later."""
    line.fake(0, B_s=0.1)
    earlier = line.config.catalog.sha256
    with line.served() as service:
        under_way = ordered(service, *(part(key=f"k{number}") for number in range(10)))
        until(lambda: service.agent.loop.requests_in_flight + service.judged >= 10)  # the agent has them
        line.document["routes"]["c0"] = [{"expert": "cls/f0", "pass": ["bad"]}]
        assert reload(service, line).is_applied
        asked(service, part(key="later"))
        for each in under_way:
            each.wait()
    rows = {row.subject.key: row.config_sha256 for row in line.rows}
    later = rows.pop("api/later")
    assert set(rows.values()) == {earlier}
    assert later == line.config.catalog.sha256 != earlier


def test_duplicate_of_an_image_judged_by_earlier_weights_is_judged_again(line):
    pattern = PATTERN.replace("[^.]+", "[^.-]+").replace(r"\.png", r"(-\d+)?\.png")
    line.watch(pattern=pattern, duplicate="skip")

    def drop(name, judged):
        line.drop(name)
        until(lambda: len(line.rows) == judged)
        row = next(row for row in line.rows if row.subject.image == name)
        return row.verdict, row.experts

    with line.served() as service:
        assert drop("B1_c0_R1.png", 1) == (OK, ("cls/f0",))
        assert drop("B1_c0_R1-2.png", 2) == (OK, ())
        line.fake(0, label="bad", weight_bytes=1_000_001)
        assert service.desk.reload().replaced == ("cls/f0",)
        assert drop("B1_c0_R1-3.png", 3) == (NG, ("cls/f0",)), "the weights that said OK serve no more"
        assert drop("B1_c0_R1-4.png", 4) == (NG, ())
