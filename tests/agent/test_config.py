"""Line files: what they become, what the environment changes, and how every mistake is told."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agent.config import LineConfig, json_schema, read_line, usage_probabilities
from agent.core.policy import PRESETS
from agent.line_file.machine import PolicyName
from agent.line_file.values import size_bytes
from experts.errors import ConfigError
from experts.expert import Precision

EXAMPLE = Path(__file__).parents[2] / "configs" / "line.yaml"
README = Path(__file__).parents[2] / "README.md"
PAGE = Path(__file__).parents[2] / "docs" / "line-file.md"
PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"
MINIMAL = f"""\
line: demo
state: ./state
experts:
  cls/r: {{architecture: resnet18, weights: r.safetensors, labels: [ok, bad], input: {{size: [64, 64]}}}}
  cls/c: {{architecture: resnet18, weights: c.safetensors, labels: [ok, bad], input: {{size: [64, 64]}}}}
  det/a: {{architecture: yolov5m, weights: a.safetensors, labels: [ok, off], input: {{size: [640, 640]}}}}
routes:
  r:
    - {{expert: cls/r, pass: [ok]}}
    - {{expert: det/a, pass: [ok]}}
  c: [{{expert: cls/c, pass: [ok]}}]
intake:
  folders:
    - path: inbox
      pattern: '{PATTERN}'
"""


def line_of(folder: Path, text: str, **environment: str) -> LineConfig:
    file = folder / "line.yaml"
    file.write_text(text)
    return read_line(file, environment)


def problems_of(folder: Path, text: str, **environment: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        line_of(folder, text, **environment)
    return [str(problem).removeprefix(f"{folder}/") for problem in caught.value.problems]


def test_a_minimal_line_has_every_default(tmp_path: Path) -> None:
    config = line_of(tmp_path, MINIMAL)
    assert (config.line, config.state) == ("demo", tmp_path / "state")
    assert set(config.catalog.experts) == {"cls/r", "cls/c", "det/a"}
    assert (config.memory.host, config.memory.device, config.memory.workspace) == (None, None, None)
    assert (config.precision, config.device, config.executors, config.policy) == (None, "auto", None, "coserve")
    assert config.scheduling.max_overtake_s == 5.0
    assert config.boards == {}
    (folder,) = config.intake.folders
    assert folder.path == tmp_path / "inbox"
    assert (folder.ready, folder.settle_ms, folder.poll_s, folder.after) == ("auto", None, 2.0, "move")


def test_values_become_typed(tmp_path: Path) -> None:
    config = line_of(
        tmp_path,
        MINIMAL + "memory: {host: 4GiB, device: 1.5GB}\nprecision: bf16\nexecutors: {cuda: 3, cpu: 1}\npolicy: em-ra\n"
        "boards: {main: {components: {r: 2}, takt_s: 30}}\napi: {grpc: 'unix:s.sock', http: '[::1]:80'}\n",
    )
    assert (config.memory.host, config.memory.device) == (4 * 2**30, 1_500_000_000)
    assert config.precision is Precision.BF16
    assert config.executors == {"cuda": 3, "cpu": 1}
    assert config.boards["main"].patience_s == 60
    assert config.api.grpc == (f"unix:{tmp_path}/s.sock",)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1B", 1), ("512MiB", 512 * 2**20), ("1.5GB", 1_500_000_000), ("4 GiB", 2**32), ("2TiB", 2**41), ("3kB", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ValueError, match="write a number and a unit"):
            size_bytes(text)
    else:
        assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("polcy: paper", "line.yaml:16:1: polcy: unknown key - did you mean 'policy'?"),
        ("policy: papr", "line.yaml:16:1: policy: Input should be 'coserve', 'paper'"),
        ("memory: {host: 4}", "line.yaml:16:10: memory.host: '4' is not a size - write a number and a unit"),
        ("memory: {host: 4GiBs}", "memory.host: '4GiBs' is not a size"),
        ("memory: {host: 0B}", "memory.host: '0B' is no memory at all"),
        ("precision: fp8", "precision: Input should be 'fp32', 'bf16', 'fp16' or 'onnxruntime', not 'fp8'"),
        ("device: gpu", "device: Input should be 'auto', 'cpu', 'cuda', 'mps' or 'emulated', not 'gpu'"),
        ("executors: {cude: 1}", "executors: no processor 'cude' - did you mean 'cuda'?"),
        ("executors: {cpu: -1}", "executors: cpu: -1 is not a count from 0 to 64"),
        ("executors: {cpu: true}", "executors: cpu: True is not a count"),
        ("executors: {cpu: 0}", "executors: no executor at all"),
        ("executors: 3", "executors: 3 is neither auto nor counts"),
        (
            "scheduling: {max_overtake_s: 0}",
            "line.yaml:16:14: scheduling.max_overtake_s: Input should be greater than 0",
        ),
        ("scheduling: {max_overtake_s: soon}", "scheduling.max_overtake_s: Input should be a valid number, not 'soon'"),
        (
            "boards: {b: {components: {x: 1}}}",
            "line.yaml:16:27: boards.b.components.x: no route for 'x' - add its route",
        ),
        ("boards: {b: {components: {r: 0}}}", "boards.b.components.r: Input should be greater than or equal to 1"),
        ("boards: {b: {components: {}}}", "boards.b.components: Dictionary should have at least 1 item"),
        ("boards: {b: {takt_s: 5}}", "boards.b.components: is missing - component type -> how many"),
        ("api: {grpc: ['0.0.0.0:8461']}", "api.grpc[0]: '0.0.0.0' can be reached from other machines"),
        ("api: {grpc: [':8461']}", "api.grpc[0]: '' can be reached from other machines"),
        ("api: {http: '127.0.0.1'}", "'127.0.0.1' is not an address - write unix:PATH or 127.0.0.1:PORT"),
        ("api: {http: '127.0.0.1:70000'}", "is not an address"),
        ("api: {http: 'unix:'}", "an address without a path"),
    ],
)
def test_a_wrong_key_is_told_with_line_and_remedy(tmp_path: Path, addition: str, expected: str) -> None:
    (problem,) = problems_of(tmp_path, MINIMAL + addition)
    assert expected in problem


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("(", "line.yaml:15:7: intake.folders[0].pattern: not a regular expression"),
        (r"(?P<board>.+)\.png", "intake.folders[0]: the pattern has no group component, ref - add (?P<component>...)"),
        (PATTERN + "(?P<bord>x)", "intake.folders[0]: nobody reads the group 'bord' - did you mean 'board'?"),
    ],
)
def test_a_pattern_must_compile_and_tell_everything(tmp_path: Path, pattern: str, expected: str) -> None:
    (problem,) = problems_of(tmp_path, MINIMAL.replace(PATTERN, pattern))
    assert expected in problem


def test_a_constant_component_stands_for_the_group(tmp_path: Path) -> None:
    constant = MINIMAL.replace(PATTERN, r"(?P<board>.+)-(?P<ref>.+)\.png")
    assert line_of(tmp_path, constant + "      component: r\n").intake.folders[0].component == "r"
    (problem,) = problems_of(tmp_path, constant + "      component: x\n")
    assert "line.yaml:16:7: intake.folders[0].component: no route for 'x'" in problem
    assert "both a key and a group" in problems_of(tmp_path, MINIMAL + "      component: r\n")[0]


def test_a_folder_is_told_by_a_pattern_or_by_sidecars(tmp_path: Path) -> None:
    without = MINIMAL.replace(f"      pattern: '{PATTERN}'\n", "")
    assert without != MINIMAL
    (problem,) = problems_of(tmp_path, without)
    assert "line.yaml:14:7: intake.folders[0].pattern: is missing - regular expression of whole file names" in problem
    config = line_of(tmp_path, without + "      identity: sidecar\n")
    assert config.intake.folders[0].has_sidecars
    (problem,) = problems_of(tmp_path, MINIMAL + "      identity: sidecar\n")
    assert "intake.folders[0].pattern: with identity: sidecar nobody reads names - leave pattern out" in problem
    assert "Input should be 'pattern' or 'sidecar'" in problems_of(tmp_path, MINIMAL + "      identity: name\n")[0]
    boards = "boards: {one: {components: {r: 1}}, two: {components: {c: 1}}}\n"
    assert line_of(tmp_path, without + "      identity: sidecar\n" + boards).boards.keys() == {"one", "two"}


def test_several_board_types_need_the_group_type(tmp_path: Path) -> None:
    boards = "boards: {one: {components: {r: 1}}, two: {components: {c: 1}}}\n"
    (problem,) = problems_of(tmp_path, MINIMAL + boards)
    assert "intake.folders[0].pattern: which of one, two is a file's board?" in problem
    assert line_of(tmp_path, MINIMAL.replace("(?P<board>", "(?P<type>[^-]+)-(?P<board>") + boards).boards.keys() == {
        "one",
        "two",
    }


def test_folders_do_not_overlap(tmp_path: Path) -> None:
    inner = f"    - {{path: inbox/inner, pattern: '{PATTERN}'}}\n"
    assert "lies in, or around, another watched folder" in problems_of(tmp_path, MINIMAL + inner)[0]


def test_cameras_are_not_in_this_version(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, MINIMAL + "  cameras: [{name: top}]\n")
    assert "line.yaml:16:3: intake.cameras: cameras are not in this version" in problem


def test_llm_experts_are_not_in_this_version(tmp_path: Path) -> None:
    assert (
        "LLM experts (moe-llm) are not in this version"
        in problems_of(tmp_path, MINIMAL.replace("yolov5m", "moe-llm"))[0]
    )


def test_problems_of_catalog_and_boards_come_together(tmp_path: Path) -> None:
    text = MINIMAL.replace("expert: cls/c", "expert: cls/d") + "boards: {b: {components: {x: 1}}}\n"
    assert len(problems_of(tmp_path, text)) == 2


def test_the_environment_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    text = MINIMAL + "scheduling: {max_overtake_s: 3.0}\n"
    assert line_of(tmp_path, text).scheduling.max_overtake_s == 3.0
    changed = line_of(tmp_path, text, COSERVE__SCHEDULING__MAX_OVERTAKE_S="2", COSERVE__MEMORY__HOST="1GiB", OTHER="x")
    assert changed.scheduling.max_overtake_s == 2.0
    assert changed.memory.host == 2**30
    assert line_of(tmp_path, text, COSERVE__EXECUTORS="{cpu: 2}").executors == {"cpu": 2}


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("COSERVE__SCHEDULING__MAX_OVERTAKE_S", "never", "scheduling.max_overtake_s: Input should be a valid number"),
        ("COSERVE__SHEDULING__MAX_OVERTAKE_S", "2", "sheduling: unknown key - did you mean 'scheduling'?"),
        ("COSERVE__MEMORY", "4GiB", "memory: Input should be a valid dictionary"),
        ("COSERVE__POLICY", "[", "quote the value"),
        ("COSERVE__", "1", "names no key"),
    ],
)
def test_a_bad_variable_is_named(tmp_path: Path, variable: str, value: str, expected: str) -> None:
    (problem,) = problems_of(tmp_path, MINIMAL, **{variable: value})
    assert problem.startswith(f"environment variable {variable}: ")
    assert expected in problem


def test_the_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "line.yaml").write_text(MINIMAL)
    monkeypatch.setenv("COSERVE__POLICY", "paper")
    assert read_line(tmp_path / "line.yaml").policy == "paper"


def test_usage_follows_the_boards_quantities(tmp_path: Path) -> None:
    boards = "boards: {one: {components: {r: 3}}}\n"
    assert usage_probabilities(line_of(tmp_path, MINIMAL + boards)) == {"cls/r": 1.0, "det/a": 1.0, "cls/c": 0.0}
    config = line_of(tmp_path, MINIMAL + "boards: {one: {components: {r: 3, c: 1}}}\n")
    assert usage_probabilities(config) == {"cls/r": 0.75, "cls/c": 0.25, "det/a": 0.75}
    assert usage_probabilities(config, {"cls/r": 0.5})["det/a"] == 0.375


def test_without_boards_all_routes_share_alike(tmp_path: Path) -> None:
    assert usage_probabilities(line_of(tmp_path, MINIMAL)) == {"cls/r": 0.5, "det/a": 0.5, "cls/c": 0.5}


def keys_of(schema: dict[str, Any]) -> set[str]:
    return {key for part in (schema, *schema["$defs"].values()) for key in part.get("properties", {})}


def keys_in_full(schema: dict[str, Any], part: dict[str, Any], path: str = "") -> dict[str, dict[str, Any]]:
    """Every key of a part of the schema by its path, `*` for a name that the owner chooses, `[]` for a list's entry."""
    part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    found: dict[str, dict[str, Any]] = {}
    for name, key in part.get("properties", {}).items():
        found |= {(inner := f"{path}.{name}".removeprefix(".")): key, **keys_in_full(schema, key, inner)}
    chosen = (part.get("additionalProperties"), *part.get("patternProperties", {}).values())
    for suffix, inside in (*((".*", each) for each in chosen), ("[]", part.get("items"))):
        if isinstance(inside, dict):
            found |= keys_in_full(schema, inside, path + suffix)
    return found


def rows_of(markdown: str) -> dict[str, str]:
    """The keys of a page's tables, each with what stands as its default."""
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", markdown, re.MULTILINE))


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    for part in (schema, *schema["$defs"].values()):
        for name, key in part.get("properties", {}).items():
            assert key.get("description"), name
    assert schema["additionalProperties"] is False


def test_the_example_is_valid_and_names_every_key_with_its_default() -> None:
    config = read_line(EXAMPLE, {})
    assert config.line == "demo"
    text = EXAMPLE.read_text()
    for key in keys_of(json_schema()):
        assert re.search(rf"\b{key}:", text), key


def test_the_example_states_the_defaults_that_hold() -> None:
    text = EXAMPLE.read_text()
    folder = json_schema()["$defs"]["FolderSection"]["properties"]
    for key in ("identity", "duplicate", "ready", "poll_s", "stale_after_s", "after", "ignore_existing", "max_pixels"):
        (line,) = re.findall(rf"^ +{key}: *(.*)$", text, re.MULTILINE)
        assert yaml.safe_load(line.split("#")[0]) == folder[key]["default"]


def test_the_page_explains_every_key_and_no_other() -> None:
    schema = json_schema()
    assert rows_of(PAGE.read_text("utf-8")).keys() == keys_in_full(schema, schema).keys()


def test_the_page_states_the_defaults_that_hold() -> None:
    schema, stated = json_schema(), rows_of(PAGE.read_text("utf-8"))
    for path, key in keys_in_full(schema, schema).items():
        if "default" not in key:
            assert stated[path] == "required", path
        elif isinstance(key["default"], str | int | float):
            assert yaml.safe_load(stated[path].strip("`")) == key["default"], path


def test_a_key_that_a_page_lacks_is_found() -> None:
    inner = {"$defs": {"Inner": {"properties": {"size": {}, "pin": {}}}}}
    schema = inner | {"properties": {"experts": {"additionalProperties": {"$ref": "#/$defs/Inner"}}}}
    page = "| `experts` | required | models |\n| `experts.*.size` | `1` | pixels, `pin` |\n"
    assert keys_in_full(schema, schema).keys() - rows_of(page).keys() == {"experts.*.pin"}


def test_the_line_file_that_the_readme_shows_is_one(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^ *```yaml\n(.*?)^ *```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert line_of(tmp_path, textwrap.dedent(shown)).line == "top-side"


def test_the_policies_are_the_presets_of_the_core() -> None:
    assert set(get_args(PolicyName)) == set(PRESETS)
