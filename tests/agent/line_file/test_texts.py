"""Texts on a line: the expert that answers a text, and the report of a wrong route."""

import pytest

from agent.line_file.usage import usage_probabilities
from tests.agent.line_files import line_of, problems_of

TEXTS = """\
line: top
state: state
experts:
  llm/code: {architecture: llm, weights: code}
  llm/maths: {architecture: llm, weights: maths}
  llm/manuals: {architecture: llm, weights: manuals}
  llm/router: {architecture: llm, weights: router, labels: [code, maths, other]}
texts:
  kv: 64MiB
  quantum_s: 0.02
  deadline_s: 30.0
  routes:
    assistant:
      rules:
        - {matches: '(?i)torque', expert: llm/manuals}
        - {matches: '^def ', expert: llm/code}
      router: llm/router
      experts: {code: llm/code, maths: llm/maths}
      otherwise: llm/manuals
    by-rule:
      rules: [{matches: '[0-9]', expert: llm/maths}]
      otherwise: llm/manuals
"""
IMAGES = """\
  cls/r: {architecture: resnet18, weights: r.safetensors, labels: [ok, bad], input: {size: [64, 64]}}
routes:
  resistor: [{expert: cls/r, pass: [ok]}]
boards:
  main: {components: {resistor: 8}}
"""
MIXED = TEXTS.replace("texts:\n", IMAGES + "texts:\n")


def test_first_matching_rule_decides_and_else_the_router_or_single_expert(tmp_path):
    config = line_of(tmp_path, TEXTS)
    assert (config.texts.kv, config.catalog.components) == (64 * 2**20, {})
    routes = config.catalog.texts
    texts = ("which TORQUE?", "def f(): ...", "def torque(): ...", " def f(): ...")
    found = [routes["assistant"].expert_for(text) for text in texts]
    assert found == ["llm/manuals", "llm/code", "llm/manuals", None]
    assert [routes["by-rule"].expert_for(text) for text in ("7", "seven")] == ["llm/maths", "llm/manuals"]


def test_route_with_a_router_branches_in_the_graph(tmp_path):
    catalog = line_of(tmp_path, MIXED).catalog
    assert sorted(catalog.graph.routes) == ["assistant", "resistor"]
    assert catalog.components.keys() == {"resistor"}
    (step,) = catalog.graph.routes["assistant"]
    assert step.expert == "llm/router"
    assert step.then == {"code": "llm/code", "maths": "llm/maths", "other": "llm/manuals"}
    assert catalog.texts["assistant"].experts == ("llm/manuals", "llm/code", "llm/router", "llm/maths")


def test_route_of_texts_counts_as_one_component(tmp_path):
    config = line_of(tmp_path, MIXED)
    usage = usage_probabilities(config.catalog, config.boards)
    assert usage["cls/r"] == pytest.approx(0.8)
    assert usage["llm/router"] == pytest.approx(0.1 / 3)  # two rules, and what they leave
    assert usage["llm/maths"] == pytest.approx(0.1 / 3 / 3 + 0.1 / 2)
    assert sum(usage.values()) == pytest.approx(1 + usage["llm/router"])  # whom a router asks comes on top of it
    config = line_of(tmp_path, TEXTS.partition("texts:")[0])
    assert set(usage_probabilities(config.catalog, config.boards).values()) == {0.0}


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        ("'(?i)torque'", "'(torque'", "texts.routes.assistant.rules[0].matches: invalid regular"),
        ("'(?i)torque'", "''", "texts.routes.assistant.rules[0].matches: String should have at least 1 character"),
        ("expert: llm/code}", "expert: llm/cod}", "texts.routes.assistant.rules[1].expert: no expert 'llm/cod' - did"),
        ("expert: llm/code}", "expert: cls/r}", "rules[1].expert: cls/r takes images, not texts - "),
        ("expert: llm/code}", "expert: llm/router}", "rules[1].expert: llm/router answers with its labels, not with"),
        ("router: llm/router", "router: llm/rooter", "texts.routes.assistant.router: no expert 'llm/rooter' - did you"),
        ("router: llm/router", "router: cls/r", "texts.routes.assistant.router: cls/r takes images, not texts"),
        ("router: llm/router", "router: llm/code", "router: llm/code has no labels to answer with - give it some"),
        ("      router: llm/router\n", "", "texts.routes.assistant.experts: its labels need a router - add router:"),
        ("{code: llm/code, ", "{cod: llm/code, ", "experts.cod: llm/router has no label 'cod' - did"),
        ("{code: llm/code, ", "{code: llm/x, ", "texts.routes.assistant.experts.code: no expert 'llm/x' - "),
        ("maths}\n      otherwise: llm/manuals\n", "maths}\n", "assistant: no expert answers for other - add each"),
        ("maths}]\n      otherwise: llm/manuals\n", "maths}]\n", "by-rule: no expert answers what no rule matches - "),
        ("otherwise: llm/manuals", "otherwise: cls/r", "assistant.otherwise: cls/r takes images, not texts"),
        ("    by-rule:", "    resistor:", "texts.routes.resistor: is a route of images, too - give it another name"),
        ("    by-rule:", "    llm/code:", "texts.routes.llm/code: 'llm/code' is not a route name"),
        ("kv: 64MiB", "kv: 64", "texts.kv: '64' is not a size"),
        ("quantum_s: 0.02", "quantum_s: 0", "texts.quantum_s: Input should be greater than or equal"),
        ("quantum_s: 0.02", "quantum_s: 60.0", "texts.quantum_s: Input should be less than or equal to 10"),
        ("deadline_s: 30.0", "deadline: 30.0", "texts.deadline: unknown key - did you mean 'deadline_s'?"),
        ("      otherwise: llm/manuals\n    by", "      otherwis: llm/manuals\n    by", "otherwis: unknown key"),
    ],
)  # fmt: skip
def test_wrong_text_key_is_reported_with_place_and_remedy(tmp_path, good, bad, expected):
    assert good in MIXED
    found = problems_of(tmp_path, MIXED.replace(good, bad))
    assert any(expected in problem for problem in found), found


def test_all_mistakes_of_texts_are_reported_at_once(tmp_path):
    text = MIXED.replace("expert: llm/maths}]", "expert: llm/x}]").replace("router: llm/router", "router: llm/y")
    assert len(problems_of(tmp_path, text)) == 2
    text = "line: top\nstate: state\nexperts:\n" + IMAGES + "texts: {kv: 1GiB}\n"  # and no language model
    (problem,) = problems_of(tmp_path, text)
    assert "texts: no expert takes texts - add one of architecture: llm" in problem
