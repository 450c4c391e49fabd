"""Line files: their configuration, overrides by the environment, and the report of every mistake."""

import re
import textwrap
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import get_args

import pytest
import yaml

from agent.config import json_schema, read_line, resolved_keys
from agent.core.policy import PRESETS
from agent.doors.unix_sockets import UnixSocket
from agent.environment import VISIBLE_GPUS, read_secret, visible_gpus
from agent.faults.errors import SecretMissing
from agent.line_file.api import LOCAL_DOORS, SOCKET_PATH_BYTES
from agent.line_file.machine import PolicyName
from agent.line_file.usage import usage_probabilities
from agent.line_file.values import SecretSection
from experts.expert import Precision
from experts.sizes import size_bytes
from tests.agent.line_files import line_of, problems_of

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


def test_values_become_typed_and_paths_relative_to_the_file(tmp_path):
    config = line_of(
        tmp_path,
        f"""{MINIMAL}
memory: {{host: 4GiB, device: 1.5GB}}
precision: bf16
executors: {{cuda: 3, cpu: 1}}
boards: {{main: {{components: {{r: 2}}, takt_s: 30}}}}
api: {{grpc: 'unix:s.sock', http: '[::1]:80'}}
""",
    )
    assert (config.line, config.state) == ("demo", tmp_path / "state")
    assert config.intake.folders[0].path == tmp_path / "inbox"
    assert (config.memory.host, config.memory.device, config.memory.workspace) == (4 * 2**30, 1_500_000_000, None)
    assert config.precision is Precision.BF16
    assert config.executors == {"cuda": 3, "cpu": 1}
    assert config.boards["main"].patience_s == 60
    assert config.api.grpc == (f"unix:{tmp_path}/s.sock",)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1B", 1), ("512MiB", 512 * 2**20), ("1.5GB", 1_500_000_000), ("4 GiB", 2**32), ("2TiB", 2**41), ("3kB", None)],
)
def test_sizes_are_read_with_their_units(text, size):
    if size is None:
        with pytest.raises(ValueError, match="write a number and a unit"):
            size_bytes(text)
    else:
        assert size_bytes(text) == size


CAMERA = "name: top, url: 'http://127.0.0.1/cam'"
CAMERAS = [
    ("{name: top}", "intake.cameras[0].url: is missing"),
    ("{name: top, url: 'ftp://x/y'}", "'ftp:' is not a camera - write rtsp://"),
    ("{name: top, url: 'rtsp:'}", "has nothing after rtsp:"),
    ("{name: top, url: 'rtsp://u:secret@h/'}", "the url contains a password"),
    (f"{{{CAMERA}}}", "a frame has neither a component nor a layout"),
    (f"{{{CAMERA}, component: q}}", "intake.cameras[0].component: no route for 'q'"),
    (f"{{{CAMERA}, component: r, board_type: none}}", "intake.cameras[0].board_type: no board type 'none'"),
    (f"{{{CAMERA}, component: r}}, {{{CAMERA}, component: r}}", "cameras[0].name: two cameras have this name"),
    (f"{{{CAMERA}, component: r, interval_s: 2.0}}", "interval_s is for mode: triggered"),
    (f"{{{CAMERA}, component: r, loop: true}}", "loop and frames_per_s are for file:"),
    (f"{{{CAMERA}, component: r, password: {{file: x}}}}", "a password without a user"),
    (f"{{{CAMERA}, component: r, user: u, password: {{}}}}", "a secret has one place"),
    (f"{{{CAMERA}, component: r, user: u, password: {{credential: a/b}}}}", "'a/b' is a path"),
]
RECEIVERS = [
    ("{mqtt: {url: 'http://x'}}", "is not a broker - write mqtt://HOST:1883"),
    ("{mqtt: {url: 'mqtt://u:p@x'}}", "the url contains a login"),
    ("{mqtt: {url: 'mqtt://x', ca: a.pem}}", "ca is for mqtts:"),
    ("{webhook: {url: 'mqtt://x'}}", "is not a web address"),
    ("{events: []}", "outbox.events"),
]


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("polcy: paper", "line.yaml:16:1: polcy: unknown key - did you mean 'policy'?"),
        ("memory: {host: 4}", "line.yaml:16:10: memory.host: '4' is not a size - write a number and a unit"),
        ("memory: {host: 0B}", "memory.host: '0B' is no memory"),
        ("device: gpu", "device: Input should be 'auto', 'cpu', 'cuda', 'mps', 'emulated' or 'integrated', not 'gpu'"),
        ("executors: {cude: 1}", "executors: no processor 'cude' - did you mean 'cuda'?"),
        ("executors: {cpu: -1}", "executors: cpu: -1 is not a count from 0 to 64"),
        ("executors: {cpu: 0}", "executors: there is no executor"),
        ("executors: 3", "executors: 3 is not auto or counts"),
        ("scheduling: {max_overtake_s: soon}", "scheduling.max_overtake_s: Input should be a valid number, not 'soon'"),
        ("boards: {b: {components: {x: 1}}}", "line.yaml:16:27: boards.b.components.x: no route for 'x' - add its"),
        (
            "boards: {b: {components: {r: 0}}}",
            "boards.b.components.r: 0 is neither a number from 1 to 100000",
        ),
        ("boards: {b: {components: {r: []}}}", "boards.b.components.r: a list of 0 refs"),
        ("boards: {b: {components: {r: [1]}}}", "boards.b.components.r: refs are texts that are not empty"),
        ("boards: {b: {components: {r: [R\u00fc, Ru\u0308]}}}", "boards.b.components.r: the ref 'Rü' is listed twice"),
        ("boards: {b: {takt_s: 5}}", "boards.b.components: is missing - component type -> number on a board"),
        ("api: {http: '127.0.0.1'}", "'127.0.0.1' is not an address - write unix:PATH or 127.0.0.1:PORT"),
        ("records: {keep: {export_required: true}}", "records: export_required keeps everything for ever without an"),
        ("api: {http: 'unix:'}", "the address has no path"),
        *((f"  cameras: [{cameras}]", expected) for cameras, expected in CAMERAS),
        *((f"outbox: {outbox}", expected) for outbox, expected in RECEIVERS),
    ],
)
def test_wrong_key_is_reported_with_line_and_remedy(tmp_path, addition, expected):
    assert expected in problems_of(tmp_path, MINIMAL + addition)[0]


FOREIGN_PATHS = ["smb://u:secret@nas/x", r"\\nas\x", "//nas/x", "nas:/x", r"D:\x", "D:", "d:/x"]


@pytest.mark.parametrize("path", FOREIGN_PATHS)
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("path: inbox", "path: '{}'", "line.yaml:14:7: intake.folders[0].path: an address of a share"),
        ("state: ./state", "state: '{}'", "line.yaml:2:1: state: an address of a share"),
        ("weights: r.safetensors", "weights: '{}'", "line.yaml:4:35: experts.cls/r.weights: an address of a share"),
        (
            "intake:\n",
            "records: {{export: {{folder: '{}'}}}}\nintake:\n",
            "records.export.folder: an address of a share",
        ),
    ],
)
def test_share_or_windows_drive_as_a_path_is_refused_with_the_remedy(tmp_path, path, before, after, expected):
    (problem,) = problems_of(tmp_path, MINIMAL.replace(before, after.format(path), 1))
    assert expected in problem
    assert "and write the mount point: /mnt/SHARE" in problem
    assert "secret" not in problem


@pytest.mark.parametrize("name", ["*", "", "sub/x.png"])
def test_invalid_pattern_to_ignore_is_refused(tmp_path, name):
    (problem,) = problems_of(tmp_path, MINIMAL + f"      ignore: [Thumbs.db, '{name}']\n")
    assert f"intake.folders[0].ignore[1]: {name!r} is no pattern of a name" in problem


def test_path_with_backslashes_is_refused_and_a_colon_in_a_name_is_not(tmp_path):
    (problem,) = problems_of(tmp_path, MINIMAL.replace("path: inbox", r"path: 'data\inbox'"))
    assert r"intake.folders[0].path: 'data\\inbox' has the backslashes of Windows - write 'data/inbox'" in problem
    (problem,) = problems_of(tmp_path, MINIMAL.replace("path: inbox", "path: 'file:///srv/inbox'"))
    assert "an address, no path - leave out file://" in problem
    assert line_of(tmp_path, MINIMAL.replace("path: inbox", "path: '2026-11-28 08:00'")).intake.folders[0].path.name


def test_pattern_must_compile_and_have_every_group_but_a_constant_component(tmp_path):
    for pattern, expected in (
        ("(", "line.yaml:15:7: intake.folders[0].pattern: invalid regular expression"),
        (r"(?P<board>.+)\.png", "intake.folders[0]: the pattern has no group component, ref - add (?P<component>...)"),
        (PATTERN + "(?P<bord>x)", "intake.folders[0]: unknown group 'bord' - did you mean 'board'?"),
    ):
        assert expected in problems_of(tmp_path, MINIMAL.replace(PATTERN, pattern))[0]
    constant = MINIMAL.replace(PATTERN, r"(?P<board>.+)-(?P<ref>.+)\.png")
    assert line_of(tmp_path, constant + "      component: r\n").intake.folders[0].component == "r"
    assert "both a key and a group" in problems_of(tmp_path, MINIMAL + "      component: r\n")[0]


def test_folder_needs_a_pattern_or_sidecars(tmp_path):
    without = MINIMAL.replace(f"      pattern: '{PATTERN}'\n", "")
    assert without != MINIMAL
    (problem,) = problems_of(tmp_path, without)
    assert "line.yaml:14:7: intake.folders[0].pattern: is missing - regular expression of whole file names" in problem
    config = line_of(tmp_path, without + "      identity: sidecar\n")
    assert config.intake.folders[0].has_sidecars
    (problem,) = problems_of(tmp_path, MINIMAL + "      identity: sidecar\n")
    assert "intake.folders[0].pattern: identity: sidecar does not read file names - leave out pattern" in problem


def test_several_board_types_need_the_group_type_unless_the_folder_has_one(tmp_path):
    boards = "boards: {one: {components: {r: 1}}, two: {components: {c: 1}}}\n"
    (problem,) = problems_of(tmp_path, MINIMAL + boards)
    assert "intake.folders[0].pattern: the board type of a file is unclear: one, two" in problem
    assert line_of(tmp_path, MINIMAL.replace("(?P<board>", "(?P<type>[^-]+)-(?P<board>") + boards).boards
    (tmp_path / "layout.yaml").write_text(LAYOUT)
    boards = "boards: {main: {components: {r: 1}, layout: layout.yaml}, other: {components: {r: 1}}}\n"
    text = MINIMAL.replace(f"'{PATTERN}'", "'(?P<board>.+)'\n      board_type: main") + boards
    assert line_of(tmp_path, text).intake.folders[0].shows_boards


LAYOUT = "size: [10, 20]\nparts:\n  R1: {component: r, box: [0, 0, 5, 5]}\n"


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("pattern: '(?P<board>.+)', board_type: other", "[1].board_type: no board type 'other'"),
        ("pattern: '(?P<board>.+)', board_type: bare", "[1].board_type: board type 'bare' has no layout to cut the"),
        ("pattern: '(?P<serial>.+)', board_type: main", "the pattern has no group board - add (?P<board>...)"),
        ("pattern: '(?P<board>.+)_(?P<ref>.+)', board_type: main", "unknown group 'ref' - known here: board"),
        ("pattern: '(?P<board>.+)', board_type: main, max_pixels: 199", "[1].max_pixels: images of 20 x 10 pixels, as"),
        ("pattern: '(?P<board>.+)', board_type: main, component: r", "keep component or board_type"),
        ("pattern: '(?P<board>.+)', board_type: main, duplicate: skip", "duplicate: skip is for files that show one"),
        ("pattern: '(?P<board>.+)', board_type: main, path: inbox/in", "is inside or around another watched folder"),
    ],
)
def test_invalid_folder_of_boards_is_reported_with_its_remedy(tmp_path, folder, expected):
    (tmp_path / "layout.yaml").write_text(LAYOUT)
    boards = "boards: {main: {components: {r: 1}, layout: layout.yaml}, bare: {components: {r: 1}}}\n"
    text = MINIMAL.replace("(?P<board>", "(?P<type>[^-]+)-(?P<board>")
    folder = folder if "path:" in folder else f"path: boards, {folder}"
    (problem,) = problems_of(tmp_path, f"{text}    - {{{folder}}}\n{boards}")
    assert expected in problem


PASSWORDS = (
    *(f"rtsp:{rest}'" for rest in ("//u:s3cret@h/", "//u:s3cret#1@h/", "//u:s3cret/1@h/", "//u:12/s3cret@h/")),
    *(f"rtsp:{rest}'" for rest in ("//u@s3cret@h:x/", "u:s3cret@h/")),
    *(f"http://h/', user: u, password: {secret}" for secret in ("s3cret", "[s3cret]", "{value: s3cret}")),
)


@pytest.mark.parametrize("camera", PASSWORDS)
def test_password_in_a_line_file_is_refused_and_not_repeated(tmp_path, camera):
    problems = problems_of(tmp_path, MINIMAL + f"  cameras: [{{name: top, component: r, url: '{camera}}}]\n")
    assert problems
    assert "s3cret" not in "".join(problems)


def test_address_of_a_camera_is_shown_without_secrets(tmp_path):
    path = tmp_path / "line.yaml"
    camera = "{name: top, component: r, url: 'http://h:81/video?user=u&pwd=s3cret', user: u, password: {file: x}}"
    path.write_text(MINIMAL + f"  cameras: [{camera}]\n")
    shown = {key.key: str(key.value) for key in resolved_keys(path, {})}
    assert shown["intake.cameras[0].url"] == "http://h:81/video?user=***&pwd=***"
    assert "s3cret" not in "".join(shown.values())


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ("{R1: {component: r, box: [0, 0, 5, 5]}}", "2:1: parts: the layout has 1 parts of 'r', its board 2"),
        ("{R1: {component: r, box: [0, 0, 5, 9]}, R2: {component: q, box: [5, 5, 5, 9]}}", "the box is empty"),
        ("{R1: {component: r, box: [0, 0, 5, 11]}, R2: {component: r, box: [5, 5, 9, 9]}}",
         "2:28: parts.R1.box: the box leaves the frame of 20 x 10"),
    ],
)  # fmt: skip
def test_layout_is_compared_with_its_board_part_by_part(tmp_path, parts, problem):
    text = MINIMAL + "boards: {b: {components: {r: 2}, layout: layout.yaml}}\n"
    (tmp_path / "layout.yaml").write_text(f"size: [10, 20]\nparts: {parts}\n")
    assert problem in problems_of(tmp_path, text)[0]
    listing = text.replace("{r: 2}", "{r: [R1, R3]}")
    differs = "'R2' of 'r' is only in one of the layout and its board"
    (tmp_path / "layout.yaml").write_text(
        "size: [10, 20]\nparts: {R1: {component: r, box: [0, 0, 5, 9]}, R2: {component: r, box: [5, 5, 9, 9]}}\n"
    )
    assert differs in problems_of(tmp_path, listing)[0]
    fits = "{R1: {component: r, box: [0, 0, 5, 9]}, R2: {component: r, box: [5, 5, 9, 9]}}"
    (tmp_path / "layout.yaml").write_text(f"size: [10, 20]\nparts: {fits}\n")
    assert line_of(tmp_path, text).layouts["b"].parts["R2"].box == (5, 5, 9, 9)


@pytest.mark.parametrize(
    ("api", "expected"),
    [
        ("{grpc: ['0.0.0.0:8461']}", "api: 0.0.0.0:8461 can be reached from other machines, unencrypted - add tls:"),
        ("{grpc: [':8461']}", "api: :8461 can be reached from other machines"),
        (
            "{http: '192.0.2.1:80', insecure_ok: true}",
            "api: 192.0.2.1:80 can be reached from other machines - add tls: and a token",
        ),
        ("{http: 'unix:s.sock', grpc: 'unix:./s.sock'}", "s.sock is used by grpc and by http - give each another"),
        ("{tokens: {owner: {role: read, file: t}}}", "api.tokens: 'owner' names another caller in the audit"),
        ("{limits: {message: many}}", "api.limits.message: 'many' is not a size"),
    ],
)
def test_unguarded_address_is_refused(tmp_path, api, expected):
    assert expected in problems_of(tmp_path, MINIMAL + f"api: {api}\n")[0]
    for guard in ("tls: {certificate: a.pem, key: a.key}", "insecure_ok: true"):
        assert line_of(tmp_path, MINIMAL + f"api: {{grpc: ['0.0.0.0:8461'], {guard}}}\n").api.grpc


def test_secrets_are_read_from_their_files_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "here").write_text("hush\n")
    (tmp_path / "empty").write_text("\n")
    assert read_secret(SecretSection(file=tmp_path / "here")) == "hush"
    assert read_secret(SecretSection(credential="here"), {"CREDENTIALS_DIRECTORY": str(tmp_path)}) == "hush"
    for secret, environment, text in (
        (SecretSection(file=tmp_path / "gone"), {}, "gone: No such file"),
        (SecretSection(file=tmp_path / "empty"), {}, "it is empty"),
        (SecretSection(credential="here"), {}, "credential here: no credentials here"),
    ):
        with pytest.raises(SecretMissing, match=text):
            read_secret(secret, environment)


@pytest.mark.parametrize(
    ("chosen", "gpus"), [({}, ["0", "1", "2"]), ({VISIBLE_GPUS: "3,1"}, ["3", "1"]), ({VISIBLE_GPUS: ""}, [])]
)
def test_processes_see_the_gpus_that_the_operator_has_chosen_in_that_order(chosen, gpus):
    assert list(islice(visible_gpus(chosen), 3)) == gpus


def test_environment_overrides_the_file_and_the_file_the_default(tmp_path):
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
def test_invalid_variable_is_named(tmp_path, variable, value, expected):
    (problem,) = problems_of(tmp_path, MINIMAL, **{variable: value})
    assert problem.startswith(f"environment variable {variable}: ")
    assert expected in problem


def test_usage_follows_the_boards_quantities_and_is_equal_without_boards(tmp_path):
    boards = ("", "boards: {one: {components: {r: 3}}}\n", "boards: {one: {components: {r: 3, c: 1}}}\n")
    configs = [line_of(tmp_path, MINIMAL + each) for each in boards]
    assert [usage_probabilities(config.catalog, config.boards) for config in configs] == [
        {"cls/r": of_r, "det/a": of_r, "cls/c": of_c} for of_r, of_c in ((0.5, 0.5), (1.0, 0.0), (0.75, 0.25))
    ]
    assert usage_probabilities(configs[-1].catalog, configs[-1].boards, {"cls/r": 0.5})["det/a"] == 0.375


def keys_in_full(schema, part, path=""):
    """Every key of a part of the schema by its path: `*` for the owner's names, `[]` for a list's entry."""
    part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    found = {}
    for alternative in (each for each in part.get("anyOf", ()) if "$ref" in each):
        found |= keys_in_full(schema, alternative, path)
    for name, key in part.get("properties", {}).items():
        found |= {(inner := f"{path}.{name}".removeprefix(".")): key, **keys_in_full(schema, key, inner)}
    chosen = (part.get("additionalProperties"), *part.get("patternProperties", {}).values())
    for suffix, inside in (*((".*", each) for each in chosen), ("[]", part.get("items"))):
        if isinstance(inside, dict):
            found |= keys_in_full(schema, inside, path + suffix)
    return found


def test_example_is_valid_and_names_every_key_with_its_default():
    assert read_line(EXAMPLE, {}).line == "demo"
    assert set(get_args(PolicyName)) == set(PRESETS)
    schema, text = json_schema(), EXAMPLE.read_text()
    for part in (schema, *schema["$defs"].values()):
        assert [key for key in part.get("properties", {}) if not re.search(rf"\b{key}:", text)] == []


def test_page_explains_every_key_with_its_default_and_no_other():
    schema = json_schema()
    keys = keys_in_full(schema, schema)
    stated = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE))
    assert stated.keys() == keys.keys()
    for path, key in keys.items():
        assert key.get("description"), path
        if "default" not in key:
            assert stated[path] == "required", path
        elif isinstance(key["default"], int) and "pattern" in key:
            assert size_bytes(stated[path].strip("` ")) == key["default"], path
        elif isinstance(key["default"], str | int | float):
            assert yaml.safe_load(stated[path].strip("`")) == key["default"], path


def test_line_file_of_the_readme_is_valid(tmp_path):
    (shown,) = re.findall(r"^ *```yaml\n(.*?)^ *```", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert line_of(tmp_path, textwrap.dedent(shown)).line == "top-side"


def test_local_socket_is_open_by_default(tmp_path):
    door = f"unix:{tmp_path / 'state' / 'coserve.sock'}"
    for api, expected in (("", (door,)), ("api: {http: '127.0.0.1:1'}\n", (door,)), ("api: {grpc: []}\n", ())):
        assert line_of(tmp_path, MINIMAL + api).api.grpc == expected
    taken = line_of(tmp_path, MINIMAL + f"api: {{http: '{door}'}}\n").api
    assert (taken.grpc, taken.http) == ((), (door,))


@pytest.mark.parametrize(("length", "is_open"), [(SOCKET_PATH_BYTES, True), (SOCKET_PATH_BYTES + 1, False)])
def test_default_socket_with_an_overlong_path_is_not_opened(tmp_path, length, is_open):
    missing = length - len(f"{tmp_path}//{LOCAL_DOORS['grpc']}")
    state = "/".join(["s" * (missing - missing // 2), "t" * (missing // 2 - 1)])
    (door,) = line_of(tmp_path, MINIMAL.replace("./state", f"./{state}")).api.grpc or (None,)
    assert (door is not None) == is_open
    if door is not None:
        UnixSocket(door).close()


@pytest.mark.parametrize("every", ["shift", "day", "8h", "30m"])
def test_golden_interval_is_read_as_shifts_days_hours_or_minutes(tmp_path, every):
    golden = line_of(tmp_path, f"{MINIMAL}\ngolden: {{every: {every}}}\n").golden
    expected = {"8h": timedelta(hours=8), "30m": timedelta(minutes=30)}.get(every, every)
    assert (golden.every, golden.on_difference) == (expected, "alarm")


@pytest.mark.parametrize("every", ["8", "0h", "week", "1.5h", "-1h"])
def test_invalid_golden_interval_is_refused(tmp_path, every):
    (problem,) = problems_of(tmp_path, f"{MINIMAL}\ngolden: {{every: {every}}}\n")
    assert "write shift, day, or hours or minutes such as 8h" in problem
