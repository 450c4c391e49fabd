"""The layers and fences of the sources, proved by parsing them: what may import what, and who reads the environment.

Every import counts, also one inside a function, under TYPE_CHECKING, or made by ``importlib.import_module``.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNREADABLE = "?"  # the target of an import whose name is computed
EDGES = ("agent.sources", "agent.doors", "agent.records")
WIRES = ("agent.doors.grpc", "agent.doors.http")
RUNTIMES = ("torch", "torchvision", "ultralytics", "onnxruntime", "onnx")
RUNTIME_FENCE = (
    "experts.backends",
    "experts.checkpoints",
    "experts.model_files",
    "experts.devices",
    "experts.llm",
    "experts.packed.packing",
    "experts.packed.weights",
    "agent.runtime",
    "agent.demo",
    "profiler.microbench",
    "profiler.bench.policy_runs",
    "profiler.bench.roofline",
    "profiler.bench.naive",
    "profiler.workload.synthetic_graphs",
    "proof",
)
STARTERS = (  # of processes, and why one beside experts.children is none of the line's
    "experts.children",
    "agent.commands.unit_files",  # a shell, once, for root
    "agent.demo.line",  # trains small experts while it renders: the library's pool
    "proof",  # other programs: the agent itself, a browser's clients, the peers of a comparison
)
NOUNS = ("agent.runtime.machine.box", "agent.runtime.expert_copy")  # which whoever needs no runtime may know
GROUND = (
    "agent.faults",
    "agent.places",
    "experts.errors",
    "experts.filesystem",
)  # what any room of the layer may import
# Each room, and what of its own layer it may import beside itself and GROUND.
ROOMS_TABLE = """
    experts.children:
    experts.devices:
    experts.image_files: expert
    experts.backends.modules:
    experts.backends: architectures backends.modules calibrations children devices document expert images labels llm
    experts.checkpoints: architectures backends children expert labels
    experts.model_files: architectures backends checkpoints expert
    experts.proving: backends catalog document expert images labels model_files.trainers sections
    experts.sections: architectures backends document expert graph labels llm.parallel.shape sizes
    experts.thresholds: expert images proving
    experts.packed: backends calibrations daemon_threads expert labels llm.gguf.header llm.files.program
    experts.llm.importing: checkpoints llm.files
    experts.llm.training: children llm llm.parallel
    experts.llm.gguf:
    experts.llm.kernels:
    experts.llm.files: llm.gguf
    experts.llm: devices llm.files llm.gguf llm.kernels
    experts.llm.arenas: devices llm
    experts.llm.text: llm.files.config llm.serving.generation llm.serving.grammar llm.serving.grammar_trial
    experts.llm.serving: children daemon_threads devices expert llm
    experts.llm.parallel: children expert llm llm.arenas.extents
    experts.llm.tiers: daemon_threads devices llm
    agent.faults:
    agent.line_file:
    agent.environment: line_file
    agent.config: environment line_file
    agent.lines: config line_file cluster
    agent.subject: line_file
    agent.places:
    agent.core:
    agent.runtime.machine: core
    agent.runtime.expert_copy: core
    agent.runtime.images: core runtime.expert_copy runtime.machine
    agent.runtime.weights: core runtime.expert_copy runtime.machine
    agent.runtime: core runtime.expert_copy runtime.images runtime.machine runtime.weights
    agent.runtime.measuring: core runtime device_profile.records
    agent.runtime.workers: core runtime
    agent.cluster: line_file runtime
    agent.device_profile: core runtime.machine.box runtime.expert_copy
    agent.deployment: config environment line_file core runtime device_profile cluster
    agent.sources.base: config subject
    agent.sources.folder.files: config line_file subject
    agent.sources.folder: config line_file subject sources.base sources.folder.files
    agent.sources.cameras.pictures:
    agent.sources.cameras: config environment line_file subject sources.base sources.cameras.pictures
    agent.sources: config line_file subject sources.base sources.folder sources.cameras
    agent.records: config line_file subject
    agent.records.delivery: config environment line_file records
    agent.records.truth: config records
    agent.records.station: config line_file records
    agent.records.retention: config line_file records
    agent.doors: config environment line_file subject
    agent.doors.proto:
    agent.doors.grpc: doors line_file subject
    agent.doors.http: doors config line_file
    agent.doors.http.inference: doors line_file
    agent.doors.http.station: doors
    agent.doors.http.texts: doors
    agent.doors.http.metrics: doors
    agent.doors.http.pages: doors.http.door doors.http.routes
    agent.service.inspections: config line_file subject core runtime deployment sources.base records doors.desk
        doors.http.metrics.readings
    agent.service.texts: subject core runtime deployment doors.desk doors.refusals doors.http.metrics.readings
        service.inspections
    agent.service.desk: config line_file subject core runtime deployment records doors.desk
        doors.http.metrics.readings service.inspections service.texts
    agent.service.station: config lines core.names core.performance core.pool core.state runtime deployment
        sources.folder.files records doors.access doors.desk doors.http.operations doors.http.session doors.http.station
        service.desk service.inspections service.texts
    agent.service: config environment line_file subject core runtime device_profile deployment lines sources records
        doors
    agent.commands: config environment lines line_file subject core runtime device_profile deployment records
        sources.cameras doors.desk doors.grpc.client doors.http.client
    agent.commands.adding: config line_file runtime.images.sources deployment.packed_copies commands.judged_images
        commands.progress commands.proving
    agent.commands.rejudging: config line_file subject core.request runtime.images.sources runtime.requests
        deployment.build deployment.worker_manager records sources.folder.files lines
    agent.commands.reviewing: config records runtime.images.sources commands.rejudging.archive
    agent.demo.rendering:
    agent.demo.training: demo.rendering
    agent.demo.texts: demo.training.learning
    agent.demo: config line_file demo.rendering demo.training demo.texts runtime records deployment service doors.desk
    profiler.charts:
    profiler.tables:
    profiler.workload:
    profiler.simulation: workload
    profiler.replay: workload
    profiler.microbench: workload
    profiler.usage: workload
    profiler.thresholds: charts workload
    profiler.allocation: workload simulation replay
    profiler.profiling: charts tables workload replay microbench usage allocation
    profiler.planning: tables workload simulation
    profiler.bench: tables workload simulation replay
    proof.paper:
    proof.parts: paper.tasks
    proof.llm:
    proof.compute:
    proof.distillation:
    proof.mesh:
    proof.cluster: paper.devices
"""


def _rooms(table):
    """Neighbours of each room; a row goes on until a word ends with a colon."""
    rooms = {}
    for word in table.split():
        if word.endswith(":"):
            own = rooms.setdefault(room := word[:-1], [])
        else:
            own.append(f"{room.partition('.')[0]}.{word}")
    return rooms


ROOMS = _rooms(ROOMS_TABLE)
IMPURE = (
    *RUNTIMES, "numpy", "threading", "multiprocessing", "concurrent", "asyncio", "time", "datetime", "logging",
    "sqlite3", "sqlite_utils", "pathlib", "os", "io", "shutil", "tempfile", "socket", "subprocess",
    "experts.backends", "experts.llm", "experts.packed.packing", "experts.packed.weights", "experts.catalog",
    "experts.sections",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's target, as an absolute dotted name."""

    importer: str
    line: int
    target: str


@dataclass(frozen=True, slots=True)
class Rule:
    """No module inside ``within`` and outside ``exempt`` imports ``forbidden``, unless it is in ``allowed``."""

    reason: str
    within: tuple[str, ...]
    forbidden: tuple[str, ...]
    exempt: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    def forbids(self, one):
        applies = is_inside(one.importer, self.within) and not is_inside(one.importer, self.exempt)
        return applies and is_inside(one.target, self.forbidden) and not is_inside(one.target, self.allowed)


def _keeps_to_its_neighbours(room):
    layer = room.partition(".")[0]
    inner = tuple(other for other in ROOMS if other.startswith(f"{room}."))
    return Rule(
        f"{room} knows its neighbours only", (room,), (layer,), exempt=inner, allowed=(room, *ROOMS[room], *GROUND)
    )


ERRORS = "|".join(
    name
    for file in ("experts/errors.py", "agent/faults/errors.py")
    for name in re.findall(r"(?m)^class (\w+)", (ROOT / file).read_text())
)


@dataclass(frozen=True, slots=True)
class Concept:
    """What stands once: only modules of ``homes`` match ``pattern``, and each home has one.

    ``breaches``: lines that a module elsewhere must not have. ``within``: package that the rule is for.
    """

    name: str
    pattern: str
    homes: tuple[str, ...]
    breaches: tuple[str, ...]
    within: str = ""

    def stands_in(self, module, source):
        return is_inside(module, (self.within,)) and re.search(self.pattern, source) is not None


CONCEPTS = (
    Concept("a process is forked or executed",
            r"\bos\.(fork|posix_spawn|exec|spawn|system|popen)|\bcreate_subprocess_|\bProcessPool",
            ("experts.children.bounded", "agent.demo.line"),
            ("os.fork()", "await asyncio.create_subprocess_exec('ls')", "pool = ProcessPoolExecutor(2)")),
    # torch.set_num_threads alone does not keep: see agent.runtime.machine.threads. The demo sets its whole process's;
    # oneDNN is asked for layouts on threads that were made for it, and end with the question.
    Concept("threads of torch are counted", "set_num_threads",
            ("agent.runtime.machine.threads", "agent.demo.training.learning", "experts.backends.onednn.operators"),
            ("torch.set_num_threads(1)",)),
    Concept("a model is timed for a profile", r"\b(perf_counter|monotonic|process_time)(_ns)?\(",
            ("agent.runtime.measuring.rig", "agent.runtime.measuring.text_times"),
            ("started_s = time.monotonic()", "return perf_counter() - started_s"), "agent.runtime.measuring"),
    Concept("a part of the offline phase has a stopwatch", r"\b(perf_counter|monotonic|process_time)(_ns)?\(",
            ("profiler.bench", "profiler.replay",  # whole lines, not models
             "profiler.microbench.decoding",  # pictures
             "profiler.profiling.profile_line"),  # the limit of its own work
            ("started_s = time.perf_counter()",), "profiler"),
    Concept("the state of a line is read", r"tally\.statistics\(\)", ("agent.service.desk.line_state",),
            ("return self.line.tally.statistics()",)),
    Concept("JSON of a verdict is made and taken apart",  # its keys are fields everywhere else
            r"""detail(\[|\.get\()|json\.loads\(\w+\["detail"\]\)|step(\[|\.get\()"(boxes|model_sha256|unproven)"""
            r"""|"(model_sha256|image_sha256|duplicate_of)": """, ("agent.records.verdict",),
            ('boxes = step["boxes"]', 'return {"model_sha256": digest}', "course = detail.get(name)")),
    Concept("a section of a line file is described", r"class \w+\(Section\)", ("agent.line_file", "experts.sections"),
            ("class Own(Section):",)),
    Concept("an error that another module may catch is defined",
            rf"(?m)^\s*class [A-Z]\w*\((.*, )?(\w*Exception|\w*Error|{ERRORS})\b",
            ("experts.errors", "agent.faults.errors"), ("class Broken(OrderRefused):", "class Away(Exception):")),
)  # fmt: skip
RULES = (
    Rule("experts is the lowest layer", ("experts",), ("agent", "profiler", "proof", "coserve")),
    Rule("agent knows nothing above it", ("agent",), ("profiler", "proof", "coserve")),
    Rule("profiler runs where no proof is installed", ("profiler",), ("proof", "coserve")),
    Rule("proof is below the command", ("proof",), ("coserve",)),
    *(_keeps_to_its_neighbours(room) for room in ROOMS),
    Rule("what is inside a room does not come in by its own door", ("agent.runtime",), ("agent.runtime.measuring",),
         exempt=("agent.runtime.measuring", "agent.runtime.workers")),
    Rule("what is measured serves nobody", ("profiler", "proof"),
         ("agent.service", "agent.demo", "agent.doors"), exempt=("proof.distillation",)),
    Rule("the texts of the demo are what its students are measured on", ("proof.distillation",),
         ("agent.service", "agent.demo", "agent.doors"), allowed=("agent.demo.texts",)),
    Rule("core decides and never does", ("agent.core",), IMPURE),
    *(Rule("edges are unaware of one another", (edge,), EDGES, allowed=(edge,)) for edge in EDGES),
    Rule("what all callers share knows no wire", ("agent.doors",), WIRES, exempt=WIRES),
    *(Rule("a wire is unaware of the other", (wire,), WIRES, allowed=(wire,)) for wire in WIRES),
    Rule("heavy runtimes stay in their fence", ("",), RUNTIMES, exempt=RUNTIME_FENCE),
    Rule("nouns know no ranks", ("experts.expert",), ("experts.llm",)),
    Rule("nouns need no runtime", NOUNS, RUNTIMES),
    Rule("words are one room's business", ("",), ("tokenizers", "jinja2"),
         exempt=("experts.llm.text", "agent.demo.texts")),
    Rule("nothing is fetched or borrowed to serve", ("",), ("transformers", "huggingface_hub", "openvino"),
         exempt=("proof",)),
    Rule("Ray is one room's business, and its peer's", ("",), ("ray", "pandas"),
         exempt=("agent.cluster", "proof.cluster")),
    Rule("Parquet is one room's business", ("",), ("pyarrow",), exempt=("agent.commands.rejudging.parts",)),
    Rule("ultralytics is one detector's business", ("",), ("ultralytics",),
         exempt=("experts.backends.vision.detector",)),
    Rule("children are started in one room", ("",), ("subprocess", "multiprocessing", "pty"), exempt=STARTERS),
    Rule("an import can be read", ("",), (UNREADABLE,)),
)  # fmt: skip


def is_inside(name, packages):
    """Whether a dotted name is one of the packages or lies in one; "" holds everything."""
    return any(package == "" or name == package or name.startswith(f"{package}.") for package in packages)


def imports_of(module, source, is_package=False):
    """All imports of a source, at any depth. ``from a import b`` counts as a.b, for b may be a module."""
    home = module if is_package else module.rpartition(".")[0]
    nodes = (node for node in ast.walk(ast.parse(source, module)) if isinstance(node, ast.stmt | ast.expr))
    return [Import(module, node.lineno, target) for node in nodes for target in _targets(node, home)]


def _targets(node, home):
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{_origin(node, home)}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _called_name(node.func) in {"import_module", "__import__"}:
        first = node.args[0] if node.args else None
        yield first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else UNREADABLE


def _origin(node, home):
    if not node.level:
        return node.module or ""
    parts = home.split(".")
    package = parts[: len(parts) - node.level + 1]
    return ".".join([*package, node.module] if node.module else package)


def _called_name(function):
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@dataclass(frozen=True, slots=True)
class EnvironmentUse:
    """One place that reads or sets the process's environment."""

    line: int
    sets: bool


ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
SETTING_METHODS = {"setdefault", "update", "pop", "clear", "popitem"}


def environment_uses(source):
    """Uses of ``os.environ`` and its kin; also ``envvar=``, with which typer reads it.

    Asking whether a variable is there is a part of setting it, where the same source sets it: ``setdefault`` at length.
    """
    tree = ast.parse(source)
    if not (nodes := [node for node in ast.walk(tree) if _is_environment(node)]):
        return []
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return [EnvironmentUse(node.lineno, _sets(node, parents)) for node in nodes]


def _is_environment(node):
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)
    if isinstance(node, ast.Call):
        return any(keyword.arg == "envvar" for keyword in node.keywords)
    return isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES


def _sets(node, parents):
    if not isinstance(node, ast.Attribute):
        return False
    around = parents[node]
    if isinstance(around, ast.Subscript):
        return isinstance(around.ctx, ast.Store | ast.Del)
    if isinstance(around, ast.Compare):
        return ast.unparse(around.left) in _names_set(parents)
    setting = isinstance(around, ast.Attribute) and around.attr in SETTING_METHODS
    return setting or node.attr in {"putenv", "unsetenv"}


def _names_set(nodes):
    subscripts = (node for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
    return {ast.unparse(node.slice) for node in subscripts if _is_environment(node.value)}


@functools.cache
def source_files():
    folders = (ROOT / name for name in ("experts", "agent", "profiler", "proof"))
    return [ROOT / "coserve.py", *sorted(path for folder in folders for path in folder.rglob("*.py"))]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def source_of(path):
    return path.read_text("utf-8")


@functools.cache
def imports_of_file(path):
    return imports_of(module_name(path), source_of(path), path.name == "__init__.py")


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


class TestSources:
    def test_all_layers_are_read(self):
        assert {module_name(path).partition(".")[0] for path in source_files()} == {
            "experts", "agent", "profiler", "proof", "coserve",
        }  # fmt: skip

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.within[0] or 'all'}: {rule.reason}")
    def test_no_import_breaks_a_rule(self, rule):
        broken = [one for path in source_files() for one in imports_of_file(path) if rule.forbids(one)]
        assert broken == []

    def test_only_the_configuration_reads_the_environment(self):
        readers = {module_name(path) for path in source_files() if _uses(path, sets=False)}
        assert readers <= {"agent.environment"}

    def test_environment_is_set_by_the_configuration_and_against_telemetry_alone(self):
        setters = {module_name(path) for path in source_files() if _uses(path, sets=True)}
        assert setters <= {"agent.environment", "experts", "experts.backends.vision.detector"}

    @pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.name)
    def test_concept_stands_only_in_its_homes(self, concept):
        found = [module_name(path) for path in source_files() if concept.stands_in(module_name(path), source_of(path))]
        assert [name for name in found if not is_inside(name, concept.homes)] == []
        assert [home for home in concept.homes if not any(is_inside(name, (home,)) for name in found)] == []

    def test_core_loads_no_runtime(self):
        heavy = {*RUNTIMES, "numpy", "sqlite3", "asyncio"}
        done = run_python(f"import agent.core.engine, sys; print(sorted({heavy} & set(sys.modules)))")
        assert (done.stdout.strip(), done.stderr) == ("[]", "")

    def test_help_loads_no_runtime(self):
        done = run_python(
            "import atexit, runpy, sys\n"
            f"atexit.register(lambda: print('LOADED', sorted({set(RUNTIMES)} & set(sys.modules))))\n"
            "sys.argv = ['coserve', '--help']\n"
            "runpy.run_path('coserve.py', run_name='__main__')\n"
        )
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout
        assert done.stdout.endswith("LOADED []\n")


def _uses(path, sets):
    return [use for use in _uses_of_file(path) if use.sets is sets]


@functools.cache
def _uses_of_file(path):
    return environment_uses(source_of(path))


def folders_of(layer):
    """The dotted names of a layer's folders that hold modules."""
    return {module_name(path).rpartition(".")[0] for path in source_files() if path.name != "__init__.py"} & {
        module_name(path) for path in (ROOT / layer).rglob("__init__.py")
    }


def room_of(name):
    """The innermost room that a dotted name lies in."""
    return max((room for room in ROOMS if is_inside(name, (room,))), key=len, default=None)


class TestRooms:
    @pytest.mark.parametrize("layer", ["experts", "agent", "profiler", "proof"])
    def test_each_folder_is_a_room_with_a_rule(self, layer):
        of_backends = {
            f"experts.backends.{name}" for name in ("forms", "onnx", "onednn", "ort", "vision")
        }  # the backends' own rooms
        assert folders_of(layer) - set(ROOMS) <= {layer, f"{layer}.cli"} | of_backends
        assert {room for room in ROOMS if room.startswith(f"{layer}.")} <= folders_of(layer) | {
            module_name(path) for path in source_files()
        }

    def test_no_two_rooms_import_each_other(self):
        edges = {}
        for path in source_files():
            for one in imports_of_file(path):
                importer, target = room_of(one.importer), room_of(one.target)
                if importer and target and importer != target:
                    edges.setdefault(importer, set()).add(target)
        assert len(edges) > len(ROOMS) / 2
        tuple(TopologicalSorter(edges).static_order())  # raises CycleError, naming the rooms


class TestImportRules:
    """Made-up sources: a rule that nothing can break proves nothing."""

    @pytest.mark.parametrize("room", ROOMS)
    def test_room_that_imports_any_other_is_found(self, room):
        layer = room.partition(".")[0]
        others = {name for name in ROOMS if name.startswith(layer)} | {f"{layer}.cli", f"{layer}.unheard_of"}
        strange = [name for name in sorted(others) if not is_inside(name, (room, *ROOMS[room], *GROUND))]
        assert len(strange) > 1
        for name in strange:
            (one, *_) = imports_of(f"{room}.inner", f"from {name} import anything")
            assert any(rule.forbids(one) for rule in RULES), name

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.within[0] or 'all'}: {rule.reason}")
    def test_every_rule_can_be_broken(self, rule):
        module = f"{rule.within[0]}.inner" if rule.within != ("",) else "agent.sources.inner"
        breaches = [Import(module, 1, target) for target in rule.forbidden if not is_inside(target, rule.allowed)]
        assert breaches
        assert all(rule.forbids(one) for one in breaches)

    @pytest.mark.parametrize(
        ("module", "source"),
        [
            ("agent.cli.app", "import coserve"),
            ("agent.core.engine", "from agent import profile"),
            ("agent.core.engine", "from ..runtime import loop"),
            ("agent.core.queue", "def f():\n    from time import monotonic"),
            ("agent.core.queue", "if TYPE_CHECKING:\n    from pathlib import Path"),
            ("agent.core.queue", "import numpy as np"),
            ("agent.core.queue", "import concurrent.futures"),
            ("agent.records.boards", "def f():\n    with g():\n        import torch.nn as nn"),
            ("agent.records.boards", "import importlib\nimportlib.import_module('torch')"),
            ("agent.records.boards", "from importlib import import_module\nimport_module(name)"),
            ("agent.records.boards", "__import__('torch')"),
        ],
    )
    def test_breach_is_found(self, module, source):
        assert any(rule.forbids(one) for one in imports_of(module, source) for rule in RULES)

    @pytest.mark.parametrize(
        ("module", "source"),
        [
            ("experts.backends.vision.detector", "from ultralytics import YOLO\nimport torch"),
            ("agent.core.engine", "from . import queue\nfrom ..core import pool\nimport heapq, math"),
            ("agent.service.line_service", "from agent.sources import folder\nfrom agent.records import journal"),
            ("agent.sources.timeline", "import timeit, onnxish"),
            ("coserve", "from agent.cli.app import app\nfrom profiler.cli.app import app as profiler_app"),
        ],
    )
    def test_permitted_imports_pass(self, module, source):
        assert [one for one in imports_of(module, source) for rule in RULES if rule.forbids(one)] == []

    def test_package_resolves_relative_imports_from_itself(self):
        found = imports_of("agent.core", "from . import engine\nfrom ..runtime import loop", is_package=True)
        assert [one.target for one in found] == ["agent.core.engine", "agent.runtime.loop"]


@pytest.mark.parametrize(
    ("source", "sets"),
    [
        ("home = os.environ['HOME']", [False]),
        ("home = system.getenv('HOME')", [False]),
        ("from os import environ", [False]),
        ("for name in os.environ:\n    pass", [False]),
        ("run(command, env=dict(os.environ))", [False]),
        ("if 'HOME' in os.environ:\n    pass", [False]),
        ("if 'HOME' not in os.environ:\n    os.environ['AWAY'] = 'true'", [False, True]),
        ("def f(home: str = typer.Option(None, envvar='HOME')):\n    pass", [False]),
        ("os.environ['YOLO_OFFLINE'] = 'true'", [True]),
        ("os.environ.setdefault('YOLO_OFFLINE', 'true')", [True]),
        ("del os.environ['YOLO_OFFLINE']", [True]),
        ("os.putenv('YOLO_OFFLINE', 'true')", [True]),
        ("if 'HOME' not in os.environ:\n    os.environ['HOME'] = make()", [True, True]),
        ("os.replace(a, b)\nrun(environment=1)", []),
    ],
)
def test_reading_the_environment_is_distinguished_from_setting_it(source, sets):
    assert [use.sets for use in environment_uses(source)] == sets


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.name)
def test_second_home_of_a_concept_is_found(concept):
    for line in concept.breaches:
        assert concept.stands_in(f"{concept.within}.inner".lstrip("."), f"def f():\n    {line}\n"), line
