"""Agents of lines with language models: what they decide with, what they measure, and what they refuse."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from copy import deepcopy

import pytest
import yaml

from agent.config import read_line
from agent.deployment.build import build_agent
from agent.deployment.line_change import keys_for_restart, plan_change
from agent.deployment.memory_needs import LEAST_LEASED_TOKENS
from agent.deployment.profile_in_use import precision_of
from experts.errors import ConfigError
from experts.expert import Precision
from experts.llm.config import read_spec
from tests.experts.llm.conftest import ModelFiles

MIB = 2**20
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}


DOCUMENT = {
    "line": "test",
    "state": "./state",
    "experts": {
        "llm/a": {"architecture": "llm", "weights": "a"},
        "llm/b": {"architecture": "llm", "weights": "b"},
        "llm/router": {"architecture": "llm", "weights": "router", "labels": ["a", "b"]},
        "cls/f": {"architecture": "fake", "weights": "f.yaml", "labels": ["ok", "bad"], "input": {"size": [8, 8]}},
    },
    "routes": {"part": [{"expert": "cls/f", "pass": ["ok"]}]},
    "texts": {
        "kv": "2MiB",
        "quantum_s": 0.02,
        "routes": {"assistant": {"router": "llm/router", "experts": {"a": "llm/a", "b": "llm/b"}}},
    },
    "device": "cpu",
    "executors": {"cpu": 1},
    "memory": {"host": "64MiB"},
}


class Line:
    """llm/a and llm/b on one backbone, a router, and an image's expert, on a CPU."""

    def __init__(self, folder):
        self.folder = folder
        self.document = deepcopy(DOCUMENT)

    @property
    def config(self):
        (self.folder / "line.yaml").write_text(yaml.safe_dump(self.document))
        return read_line(self.folder / "line.yaml", {})

    @contextmanager
    def built(self):
        agent = build_agent(self.config, lambda request, outcome: None, lambda stage, done, total: None)
        try:
            yield agent
        finally:
            agent.stop()

    def refusal(self):
        with pytest.raises(ConfigError) as caught, self.built():
            pass
        return str(caught.value)

    def spec(self, name):
        return read_spec(self.folder / name, name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    files = ModelFiles(folder)
    values = files.config("llama", **SIZES)
    backbone = files.tensors(values)
    for name, seed in (("a", 1), ("b", 2)):
        own = files.tensors(values, seed=seed)
        mixed = {key: own[key] if "layers.5.mlp" in key else tensor for key, tensor in backbone.items()}
        files.write(values, mixed).rename(folder / name)
    files.write(files.config("olmoe")).rename(folder / "router")
    (folder / "f.yaml").write_text(json.dumps({"weight_bytes": 100_000, "label": "ok", "workspace_bytes": 1000}))
    return folder


@pytest.fixture
def line(weights, tmp_path):
    shutil.copytree(weights, tmp_path / "line")
    return Line(tmp_path / "line")


@pytest.fixture(scope="module")
def setup(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "line"
    shutil.copytree(weights, folder)
    line = Line(folder)
    with line.built() as agent:
        return line, agent.setup


class TestWhatAnAgentDecidesWith:
    def test_times_of_tokens_are_measured_and_their_bytes_are_exact(self, setup):
        line, found = setup
        for name in ("a", "b", "router"):
            performance = found.matrix.experts["cpu"][f"llm/{name}"].performance
            assert performance.runs_in_quanta
            assert performance.lease_bytes == line.spec(name).kv_bytes(4)
            assert min(performance.K_s, performance.B_s, performance.K_prompt_s, performance.K_output_s) > 0
            assert performance.max_batch >= 4
            assert performance.workspace_for(2) > performance.workspace_for(1) > 0

    def test_models_of_one_config_are_measured_once(self, setup):
        column = setup[1].matrix.experts["cpu"]
        assert column["llm/a"].performance is column["llm/b"].performance
        assert column["llm/router"].performance != column["llm/a"].performance

    def test_what_they_share_is_held_once(self, setup):
        one, other = (setup[1].matrix.experts["cpu"][name].footprint for name in ("llm/a", "llm/b"))
        assert one.shared == other.shared != ()
        assert one.total_bytes + other.own_bytes < 1.2 * one.total_bytes

    def test_models_of_one_backbone_are_a_family(self, setup):
        column = setup[1].matrix.experts["cpu"]
        assert column["llm/a"].family == column["llm/b"].family is not None
        assert column["llm/router"].family is None
        assert column["cls/f"].family is None

    def test_routes_of_texts_branch(self, setup):
        (step,) = setup[1].graph.routes["assistant"]
        assert step.then == {"a": "llm/a", "b": "llm/b"}


class TestMemoryOfTexts:
    def test_automatic_it_is_a_quarter(self, line):
        del line.document["texts"]["kv"]
        with line.built() as agent:
            assert agent.setup.pools[0].lease_bytes == 16 * MIB

    def test_a_model_that_never_fits_is_refused_with_its_size_and_what_takes_the_room(self, line):
        line.document["memory"]["host"] = "6MiB"
        text = line.refusal()
        assert "experts.llm/a: needs" in text
        assert "MiB of its 6.0 MiB to experts" in text
        assert "lower texts.kv, which takes 2.0 MiB" in text

    def test_automatic_it_keeps_what_a_short_text_needs(self, line):
        del line.document["texts"]["kv"]
        line.document["memory"]["host"] = "6MiB"
        least_mib = LEAST_LEASED_TOKENS * line.spec("a").kv_bytes(4) / MIB
        assert f"lower texts.kv, which takes {least_mib:.1f} MiB" in line.refusal()


class TestWhatIsWrongWithOne:
    def test_only_that_one_is_broken(self, line):
        config = json.loads((line.folder / "b" / "config.json").read_text())
        (line.folder / "b" / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
        with line.built() as agent:
            assert agent.setup.broken.keys() == {"llm/b"}
            assert "config.json: hidden_act: 'gelu' is not served" in agent.setup.broken["llm/b"]
            assert agent.setup.matrix.experts["cpu"].keys() == {"llm/a", "llm/router", "cls/f"}


class TestPrecisions:
    @pytest.mark.parametrize(
        ("of_line", "own", "expected"),
        [
            ("auto", None, "fp32"),
            ("bf16", None, "bf16"),
            ("bf16", "fp32", "fp32"),
            ("auto", "bf16", "bf16"),
            ("onnxruntime", None, "fp32"),
            ("fp32", "int8", "int8"),
            ("bf16", "auto", "fp32"),
        ],
    )
    def test_its_own_comes_before_the_line_s(self, line, of_line, own, expected):
        line.document["precision"] = of_line
        if own is not None:
            line.document["experts"]["llm/a"]["precision"] = own
        assert precision_of(line.config, "llm/a", "cpu", None, None) == Precision(expected)


class TestReload:
    def test_texts_cannot_come_to_an_agent_without_memory_for_them(self, line):
        texts = {name: line.document["experts"].pop(name) for name in ("llm/a", "llm/b", "llm/router")}
        section = line.document.pop("texts")
        with line.built() as agent:
            line.document["experts"] |= texts
            line.document["texts"] = section
            with pytest.raises(ConfigError, match="no memory was kept for their keys and values"):
                plan_change(agent, line.config, lambda stage, done, total: None)

    @pytest.mark.parametrize(
        ("changed", "asks"), [({"routes": {}}, ()), ({"quantum_s": 0.1}, ("texts",)), ({"kv": "3MiB"}, ("texts",))]
    )
    def test_routes_of_texts_are_taken_over_and_nothing_else_of_them(self, line, changed, asks):
        before = line.config
        line.document["texts"] |= changed
        assert keys_for_restart(before, line.config) == asks

    def test_what_stands_beside_weights_that_changed_is_another_expert(self, line):
        with line.built() as agent:
            (line.folder / "b" / "generation_config.json").write_text("{}")
            change = plan_change(agent, line.config, lambda stage, done, total: None)
        assert change.replaced == ("llm/b",)

    def test_a_route_of_texts_that_changed(self, line):
        with line.built() as agent:
            line.document["texts"]["routes"]["assistant"]["experts"] = {"a": "llm/b", "b": "llm/a"}
            change = plan_change(agent, line.config, lambda stage, done, total: None)
        (step,) = change.event.graph.routes["assistant"]
        assert step.then == {"a": "llm/b", "b": "llm/a"}


@pytest.mark.parametrize(
    ("stored", "multiplied", "own"),
    [("bfloat16", True, "bf16"), ("bfloat16", False, "fp32"), ("float16", True, "fp16"), ("float32", True, "fp32")],
)
def test_a_model_runs_as_it_is_stored_where_the_processor_multiplies_that(line, monkeypatch, stored, multiplied, own):
    monkeypatch.setattr("experts.backends.forms.plain.is_multiplied", lambda precision: multiplied)
    file = line.folder / "a" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": stored}))
    assert precision_of(line.config, "llm/a", "cpu", None, None) == own
    assert precision_of(line.config, "cls/f", "cpu", None, None) == Precision.FP32
    line.document["precision"] = "fp32"
    assert precision_of(line.config, "llm/a", "cpu", None, None) == Precision.FP32


def test_int8_for_a_line_of_language_models_alone(line):
    line.document["precision"] = "int8"
    with pytest.raises(ConfigError, match="cls/f takes images"):
        _ = line.config
    del line.document["experts"]["cls/f"], line.document["routes"]
    assert precision_of(line.config, "llm/a", "cpu", None, None) == Precision.INT8
