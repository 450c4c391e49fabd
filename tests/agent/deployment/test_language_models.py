"""Agents of lines with language models: their Engine's arguments, measurements and refusals."""

import json
import shutil
from copy import deepcopy

import pytest

from agent.deployment.line_change import keys_for_restart, plan_change
from agent.deployment.memory_needs import LEAST_LEASED_TOKENS
from agent.deployment.profile_in_use import precision_of
from experts.errors import ConfigError
from experts.expert import Precision
from experts.llm.files.config import read_spec
from tests.agent.line_files import LineFile, expert, fake, route
from tests.experts.llm.conftest import ModelFiles

MIB = 2**20
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}


DOCUMENT = {
    "experts": {
        "llm/a": {"architecture": "llm", "weights": "a"},
        "llm/b": {"architecture": "llm", "weights": "b"},
        "llm/router": {"architecture": "llm", "weights": "router", "labels": ["a", "b"]},
        "cls/f": expert("f.yaml"),
    },
    "routes": {"part": route("cls/f")},
    "texts": {
        "kv": "2MiB",
        "quantum_s": 0.02,
        "routes": {"assistant": {"router": "llm/router", "experts": {"a": "llm/a", "b": "llm/b"}}},
    },
    "device": "cpu",
    "executors": {"cpu": 1},
    "memory": {"host": "64MiB"},
}


class Line(LineFile):
    """llm/a and llm/b on one backbone, a router, and an image's expert, on a CPU."""

    def __init__(self, folder):
        super().__init__(folder, **deepcopy(DOCUMENT))

    def spec(self, name):
        return read_spec(self.folder / name, name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights"))


def write_weights(folder):
    files = ModelFiles(folder)
    values = files.config("llama", **SIZES)
    backbone = files.tensors(values)
    for name, seed in (("a", 1), ("b", 2)):
        own = files.tensors(values, seed=seed)
        mixed = {key: own[key] if "layers.5.mlp" in key else tensor for key, tensor in backbone.items()}
        files.write(values, mixed).rename(folder / name)
    files.write(files.config("olmoe")).rename(folder / "router")
    fake(folder / "f.yaml", 100_000)
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
    with line.built() as (agent, *_):
        return line, agent.setup


def test_agent_decides_with_measured_times_and_exact_bytes(setup):
    line, found = setup
    column = found.matrix.experts["cpu"]
    for name in ("a", "b", "router"):
        performance = column[f"llm/{name}"].performance
        assert performance.runs_in_quanta
        assert performance.lease_bytes == line.spec(name).kv_bytes(4)
        assert min(performance.K_s, performance.B_s, performance.K_prompt_s, performance.K_output_s) > 0
        assert performance.max_batch >= 4
        assert performance.workspace_for(2) > performance.workspace_for(1) > 0
    assert column["llm/a"].performance is column["llm/b"].performance, "models of one config are measured once"
    assert column["llm/router"].performance != column["llm/a"].performance


def test_models_of_one_backbone_are_a_family_and_hold_it_once(setup):
    column = setup[1].matrix.experts["cpu"]
    one, other = (column[name].footprint for name in ("llm/a", "llm/b"))
    assert one.shared == other.shared != ()
    assert one.total_bytes + other.own_bytes < 1.2 * one.total_bytes
    assert column["llm/a"].family == column["llm/b"].family is not None
    assert (column["llm/router"].family, column["cls/f"].family) == (None, None)


def test_model_that_never_fits_is_refused_with_its_size_and_the_share_of_texts(line):
    line.document["memory"]["host"] = "6MiB"
    text = line.refusal()
    assert "experts.llm/a: needs" in text
    assert "MiB of its 6.0 MiB to experts" in text
    assert "lower texts.kv, which takes 2.0 MiB" in text
    del line.document["texts"]["kv"]
    least_mib = LEAST_LEASED_TOKENS * line.spec("a").kv_bytes(4) / MIB
    assert f"lower texts.kv, which takes {least_mib:.1f} MiB" in line.refusal()


def test_unservable_model_is_broken_alone(line):
    config = json.loads((line.folder / "b" / "config.json").read_text())
    (line.folder / "b" / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    del line.document["texts"]["kv"]
    with line.built() as (agent, *_):
        assert agent.setup.broken.keys() == {"llm/b"}
        assert "config.json: hidden_act: 'gelu' is not served" in agent.setup.broken["llm/b"]
        assert agent.setup.matrix.experts["cpu"].keys() == {"llm/a", "llm/router", "cls/f"}
        assert agent.setup.pools[0].lease_bytes == 16 * MIB, "by default a quarter"


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
            ("fp32", "int4", "int4"),
            ("bf16", "auto", "fp32"),
        ],
    )
    def test_precision_of_an_expert_overrides_the_lines(self, line, of_line, own, expected):
        line.document["precision"] = of_line
        if own is not None:
            line.document["experts"]["llm/a"]["precision"] = own
        assert precision_of(line.config, "llm/a", "cpu", None, None) == Precision(expected)


class TestReload:
    def test_reload_that_adds_texts_without_memory_for_them_is_refused(self, line):
        texts = {name: line.document["experts"].pop(name) for name in ("llm/a", "llm/b", "llm/router")}
        section = line.document.pop("texts")
        with line.built() as (agent, *_):
            line.document["experts"] |= texts
            line.document["texts"] = section
            with pytest.raises(ConfigError, match="no memory was kept for their keys and values"):
                plan_change(agent, line.config, lambda *_: None)

    @pytest.mark.parametrize(
        ("changed", "asks"), [({"routes": {}}, ()), ({"quantum_s": 0.1}, ("texts",)), ({"kv": "3MiB"}, ("texts",))]
    )
    def test_reload_takes_new_text_routes_and_asks_a_restart_for_other_text_keys(self, line, changed, asks):
        before = line.config
        line.document["texts"] |= changed
        assert keys_for_restart(before, line.config) == asks

    def test_changed_file_beside_weights_replaces_its_expert_and_routes_are_reloaded(self, line):
        with line.built() as (agent, *_):
            (line.folder / "b" / "generation_config.json").write_text("{}")
            line.document["texts"]["routes"]["assistant"]["experts"] = {"a": "llm/b", "b": "llm/a"}
            change = plan_change(agent, line.config, lambda *_: None)
        assert change.replaced == ("llm/b",)
        (step,) = change.event.graph.routes["assistant"]
        assert step.then == {"a": change.agent.expert("llm/b"), "b": "llm/a"}


@pytest.mark.parametrize(
    ("stored", "multiplied", "own"),
    [("bfloat16", True, "bf16"), ("bfloat16", False, "fp32"), ("float16", True, "fp16"), ("float32", True, "fp32")],
)
def test_model_runs_in_its_stored_precision_where_the_processor_has_it(line, monkeypatch, stored, multiplied, own):
    monkeypatch.setattr("experts.backends.forms.plain.is_multiplied", lambda precision: multiplied)
    file = line.folder / "a" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": stored}))
    assert precision_of(line.config, "llm/a", "cpu", None, None) == own
    assert precision_of(line.config, "cls/f", "cpu", None, None) == Precision.FP32
    line.document["precision"] = "fp32"
    assert precision_of(line.config, "llm/a", "cpu", None, None) == Precision.FP32


def test_int8_is_allowed_for_a_line_of_language_models_only(line):
    line.document["precision"] = "int8"
    with pytest.raises(ConfigError, match="cls/f takes images"):
        _ = line.config
    del line.document["experts"]["cls/f"], line.document["routes"]
    assert precision_of(line.config, "llm/a", "cpu", None, None) == Precision.INT8
