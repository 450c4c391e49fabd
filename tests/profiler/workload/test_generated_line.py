"""Generated lines: reproducible, distinct, sized to the byte, gone afterwards, and never larger than the disk."""

import signal
from dataclasses import replace

import pytest
from safetensors.numpy import load_file

from agent.config import read_line
from experts.errors import ConfigError
from experts.images import read_image
from profiler.workload import generated_line
from profiler.workload.generated_line import LineRecipe, generate_line, removed_afterwards
from profiler.workload.traces import read_trace
from tests.profiler.lines import built_agent

ON_CPU = {"COSERVE__DEVICE": "cpu"}  # the environment
RECIPE = LineRecipe(
    classifiers=4, architecture="squeezenet1_1", requests=50, memory_for=2, classifier_px=64, images=3, seed=5
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return generate_line(tmp_path_factory.mktemp("generated") / "line", RECIPE)


def contents(line):
    """Every file of a line but its packed ones, whose bytes follow from the others."""
    folder = line.line.parent
    files = (path for path in folder.rglob("*") if path.is_file() and "state" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_equal_recipes_give_equal_bytes_and_another_seed_others(generated, tmp_path):
    first, again = contents(generated), contents(generate_line(tmp_path / "again", RECIPE))
    other = contents(generate_line(tmp_path / "other", replace(RECIPE, seed=6)))
    assert first == again
    assert first.keys() == other.keys()
    assert {name for name in first if first[name] == other[name]} == set()


def test_no_tensor_is_equal_in_two_generated_experts(generated):
    files = sorted((generated.line.parent / "weights").iterdir())
    assert len(files) == RECIPE.classifiers
    states = [load_file(file) for file in files]
    for name in states[0]:
        assert len({state[name].tobytes() for state in states}) == len(states), name


def test_generated_line_is_read_by_the_agent_and_exactly_so_many_experts_fit(generated):
    with built_agent(read_line(generated.line, ON_CPU)) as (agent, _):
        (pool,) = agent.setup.pools
        footprints = {row.footprint.total_bytes for row in agent.setup.matrix.experts["cpu"].values()}
    assert footprints == {generated.footprint_bytes}
    assert pool.expert_bytes == generated.expert_bytes == RECIPE.memory_for * generated.footprint_bytes
    assert pool.workspace_bytes == generated.workspace_bytes


def test_generated_trace_has_its_requests_on_readable_images(generated):
    trace = read_trace(generated.trace, read_line(generated.line, ON_CPU).catalog)
    assert [arrival.at_s for arrival in trace] == pytest.approx([0.004 * number for number in range(50)])
    assert {read_image(path, path.name).shape for path in {arrival.image for arrival in trace}} == {(64, 64, 3)}
    assert len({arrival.image for arrival in trace}) == RECIPE.images


def test_detectors_follow_some_classifiers_and_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(generated_line, "DETECTORS", ("yolov5n", "yolov8n"))
    recipe = replace(RECIPE, classifiers=7, detectors=2, detector_px=64, memory_for=8)
    config = read_line(generate_line(tmp_path / "line", recipe).line, ON_CPU)
    routes = {component: [step.expert for step in steps] for component, steps in config.catalog.graph.routes.items()}
    assert [route for route in routes.values() if len(route) == 2] == [
        ["cls/000", "det/000"],
        ["cls/003", "det/001"],
        ["cls/006", "det/000"],
    ]
    assert [config.catalog.experts[f"det/00{n}"].architecture for n in range(2)] == ["yolov5n", "yolov8n"]
    assert config.catalog.graph.routes["part-000"][0].passing == {"ok", "missing", "shifted"}


def test_folder_with_files_or_a_full_disk_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"1000000000 experts and .* need \d+ bytes .* free: make room"):
        generate_line(tmp_path / "line", replace(RECIPE, classifiers=10**9))
    assert list((tmp_path / "line").iterdir()) == []
    with pytest.raises(ConfigError, match="is not empty"):
        generate_line(tmp_path, RECIPE)
    assert [path.name for path in tmp_path.iterdir()] == ["line"]


def test_architecture_without_weights_of_its_own_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="classifiers and YOLO detectors only"):
        generate_line(tmp_path / "line", replace(RECIPE, architecture="onnx"))


@pytest.mark.parametrize(
    "mistake",
    [{"classifiers": 0}, {"requests": 0}, {"memory_for": 0}, {"images": 0}, {"detectors": -1}],
)
def test_recipe_that_makes_no_line_is_refused(mistake):
    with pytest.raises(ConfigError):
        LineRecipe(**mistake)


def end_in(directory):
    with removed_afterwards(directory) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
        signal.raise_signal(signal.SIGTERM)


def test_signal_leaves_nothing_and_restores_the_earlier_handler(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        end_in(tmp_path)
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
