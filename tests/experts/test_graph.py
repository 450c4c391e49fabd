"""Routes that branch: the label that a router answers with picks the expert that ends the route."""

from pathlib import Path

import pytest

from experts.backends.outputs import label_by_label
from experts.expert import NOTHING_FOUND, Expert, Prediction, Task, Verdict
from experts.graph import ExpertGraph, Judgement, RouteStep

OK = frozenset({"ok"})
BRANCHES = {"code": "coder", "maths": "solver", "sums": "solver"}
ROUTER = RouteStep("router", frozenset(), 0.5, BRANCHES)


@pytest.fixture
def graph():
    return ExpertGraph(
        ["router", "coder", "solver", "eye"],
        {"auto": (ROUTER,), "seen": (RouteStep("eye", OK), ROUTER), "plain": (RouteStep("eye", OK),)},
    )


@pytest.mark.parametrize(("label", "expert"), BRANCHES.items())
def test_label_picks_the_expert_that_ends_the_route(graph, label, expert):
    assert graph.judge("auto", 0, Prediction(label, 0.9)) == Judgement(label, 0.9, expert, None)
    for route, step in (("auto", 1), ("seen", 2)):  # whatever that one says
        assert graph.judge(route, step, Prediction("length", 0.1)) == Judgement("length", 0.1, None, Verdict.OK)


def test_label_that_picks_no_branch_ends_the_route_by_whether_it_passes(graph):
    assert graph.judge("auto", 0, Prediction("manuals", 0.9)).verdict is Verdict.NG
    assert graph.judge("auto", 0, Prediction("code", 0.4)).verdict is Verdict.NG
    step = RouteStep("router", OK, then={"code": "coder"})
    graph = ExpertGraph(["router", "coder"], {"auto": (step,)})
    assert graph.judge("auto", 0, Prediction("ok", 0.9)).verdict is Verdict.OK


def test_branch_depends_on_its_router(graph):
    assert graph.subsequents("router") == ("coder", "solver")
    assert graph.preliminaries("solver") == graph.preliminaries("coder") == {"router"}
    assert graph.preliminaries("router") == {"eye"}
    assert (graph.experts_of("seen"), graph.experts_of("unknown")) == (("eye", "router", "coder", "solver"), ())


def test_branches_are_as_likely_as_their_labels_or_equal_if_unknown(graph):
    usage = graph.usage({"seen": 0.9}, {"eye": 0.5, "router": 0.8})
    assert usage == pytest.approx({"eye": 0.9, "router": 0.45, "coder": 0.12, "solver": 0.24})
    usage = graph.usage({"auto": 1.0}, {}, {"router": {"code": 0.7, "maths": 0.2}})
    assert usage == pytest.approx({"router": 1.0, "coder": 0.7, "solver": 0.2})


def test_route_branches_in_its_last_step_only():
    with pytest.raises(ValueError, match="auto branches before its last step"):
        ExpertGraph(["router", "coder", "solver", "eye"], {"auto": (ROUTER, RouteStep("eye", OK))})


@pytest.mark.parametrize(
    ("labels", "otherwise", "passing", "probabilities", "expected"),
    [
        (("scratch", "dent"), "ok", {"ok"}, (0.1, 0.2), ("OK", "ok", 0.8)),
        (("scratch", "dent"), "ok", {"ok"}, (0.6, 0.9), ("NG", "dent", 0.9)),
        (("scratch", "dent"), "ok", {"ok"}, (0.1, 0.5), ("NG", "dent", 0.5)),
        (("scratch", "dent"), NOTHING_FOUND, {"ok"}, (0.1, 0.2), ("NG", NOTHING_FOUND, 0.8)),
        (("scratch", "flux"), "ok", {"ok", "flux"}, (0.1, 0.9), ("OK", "flux", 0.9)),
        (("scratch", "flux"), "ok", {"ok", "flux"}, (0.7, 0.9), ("NG", "scratch", 0.7)),
        (("ok", "scratch"), NOTHING_FOUND, {"ok"}, (0.7, 0.6), ("NG", "scratch", 0.6)),
        (("ok", "scratch"), NOTHING_FOUND, {"ok"}, (0.7, 0.4), ("OK", "ok", 0.6)),
        (("ok", "scratch"), NOTHING_FOUND, {"ok"}, (0.2, 0.4), ("NG", NOTHING_FOUND, 0.8)),
        (("oriented", "soldered"), "bad", {"oriented", "soldered"}, (0.9, 0.8), ("OK", "oriented", 0.8)),
        (("oriented", "soldered"), "bad", {"oriented", "soldered"}, (0.9, 0.25), ("NG", "bad", 0.75)),
        (("ok",), "ng", {"ok"}, (0.75,), ("OK", "ok", 0.75)),
        (("ok",), "ng", {"ok"}, (0.25,), ("NG", "ng", 0.75)),
        (("ng",), "ok", {"ok"}, (0.25,), ("OK", "ok", 0.75)),
        (("ng",), "ok", {"ok"}, (0.75,), ("NG", "ng", 0.75)),
    ],
)
def test_multilabel_image_passes_on_evidence_only(labels, otherwise, passing, probabilities, expected):
    expert = Expert("eye", "resnet18", Path("x"), labels, None, task=Task.MULTILABEL, otherwise=otherwise)
    (prediction,) = label_by_label(expert, [probabilities])
    graph = ExpertGraph(["eye"], {"seen": (RouteStep("eye", frozenset(passing)),)})
    found = graph.judge("seen", 0, prediction)
    assert (found.verdict, found.label, found.score) == (expected[0], expected[1], pytest.approx(expected[2]))
    stricter = ExpertGraph(["eye"], {"seen": (RouteStep("eye", frozenset(passing), 0.95),)})
    assert stricter.judge("seen", 0, prediction).verdict is Verdict.NG
