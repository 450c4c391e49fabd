"""A line with language models, profiled: what is measured of them, and an agent that starts from it."""

import pytest

from agent.runtime.measuring.batches import BatchOptions
from profiler.allocation.step import CASUAL
from profiler.microbench.texts import MADE_UP
from profiler.profiling.profile_line import ProfilingOptions, profile_line
from tests.agent.line_files import LineFile, expert, fake, route
from tests.experts.llm.conftest import ModelFiles
from tests.profiler.lines import built_agent

DOCUMENT = {
    "experts": {
        "llm/a": {"architecture": "llm", "weights": "a"},
        "llm/small": {"architecture": "llm", "weights": "a", "precision": "int8"},
        "llm/broken": {"architecture": "llm", "weights": "broken"},
        "cls/f": expert("f.yaml"),
    },
    "routes": {"part": route("cls/f")},
    "texts": {"kv": "1MiB", "routes": {"assistant": {"otherwise": "llm/a"}}},
    "executors": {"cpu": 1},
    "device": "cpu",
    "memory": {"host": "64MiB"},
}
SHORT = ProfilingOptions(allocation=CASUAL, batches=BatchOptions(sizes=(1, 2), repeats=1, limit_s=0.3))


def no_progress(stage, done, total):
    pass


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    files = ModelFiles(folder)
    values = files.config("qwen3")
    files.write(values).rename(folder / "a")
    tensors = files.tensors(values)
    tensors["model.norm.weight"][:] = 1e38
    files.write(values, tensors).rename(folder / "broken")
    fake(folder / "f.yaml", 100_000)
    config = LineFile(folder, **DOCUMENT).config
    return config, profile_line(config, SHORT, no_progress)


def kinds_of(profiled):
    return {kind.precision: kind for kind in profiled.profile.chosen_kinds if kind.lease_bytes}


def test_each_language_model_is_measured_in_its_own_precision(profiled):
    _, found = profiled
    kinds = kinds_of(found)
    assert "int8" in kinds
    assert set(kinds) == {"int8"} | {each.precision for each in found.profile.forms.values()}
    assert found.profile.forms["llm/broken", "cpu"].precision == "fp32"  # of which nothing is proven
    agreeing = {(each.kind, each.precision) for each in found.profile.agreements if each.agrees and each.images}
    assert any("in int8 on cpu against fp32: the same likeliest token at" in note for note in found.notes)
    assert any(note.startswith("llm/broken cannot be served:") for note in found.notes)
    for kind in kinds.values():
        assert min(kind.K_prompt_s, kind.K_output_s, kind.B_s) > 0
        assert kind.precision in {"fp32", "int8"} or (kind.kind, kind.precision) in agreeing
        assert kind.samples.startswith(MADE_UP)


def test_agent_starts_from_a_profile_of_language_models_without_a_probe(profiled):
    config, found = profiled
    with built_agent(config) as (agent, stages):
        assert "probe" not in stages
    rows = agent.setup.matrix.experts["cpu"]
    kinds = kinds_of(found)
    assert rows["llm/small"].copy == "llm/small@int8"
    assert rows["llm/small"].performance.K_output_s == pytest.approx(kinds["int8"].K_output_s)
    assert rows["llm/small"].performance.lease_bytes == kinds["int8"].lease_bytes
    assert agent.setup.pools[0].lease_bytes == 2**20


def test_language_model_larger_than_memory_is_measured_as_it_is_held(tmp_path):
    files = ModelFiles(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_experts": 128}
    files.write(files.config("olmoe", **sizes)).rename(tmp_path / "large")
    document = {key: value for key, value in DOCUMENT.items() if key not in {"routes", "texts"}} | {
        "experts": {"llm/large": {"architecture": "llm", "weights": "large"}},
        "memory": {"host": "40MiB"},
        "precision": "fp32",
    }
    config = LineFile(tmp_path, **document).config
    found = profile_line(config, SHORT, no_progress)
    (kind,) = found.profile.chosen_kinds
    assert kind.weight_bytes < 40 * 2**20 < 2 * 128 * 3 * 64 * 256 * 4
    with built_agent(config) as (agent, _):
        pass
    assert agent.setup.broken == {}
    assert agent.setup.matrix.experts["cpu"]["llm/large"].performance.K_output_s > 0
