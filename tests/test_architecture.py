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
GROUND = ("agent.faults", "agent.places")  # what any room may import of its own layer
# Each room, and what of its own layer it may import beside itself.
ROOMS = {
    "experts.children": ("experts.errors",),
    "experts.image_files": ("experts.errors", "experts.expert"),
    "experts.backends.modules": ("experts.errors",),
    "experts.backends": (
        "experts.architectures", "experts.backends.modules", "experts.calibrations", "experts.children",
        "experts.document", "experts.errors", "experts.expert", "experts.images", "experts.labels", "experts.llm",
    ),
    "experts.checkpoints": (
        "experts.architectures", "experts.backends", "experts.children", "experts.errors", "experts.expert",
        "experts.filesystem", "experts.labels",
    ),
    "experts.model_files": (
        "experts.architectures", "experts.backends", "experts.checkpoints", "experts.errors", "experts.expert",
    ),
    "experts.proving": (
        "experts.backends", "experts.catalog", "experts.document", "experts.errors", "experts.expert",
        "experts.filesystem", "experts.images", "experts.labels", "experts.model_files.trainers", "experts.sections",
    ),
    "experts.sections": (
        "experts.architectures", "experts.backends", "experts.document", "experts.errors", "experts.expert",
        "experts.graph", "experts.labels", "experts.llm.parallel.shape", "experts.sizes",
    ),
    "experts.thresholds": ("experts.expert", "experts.images", "experts.proving"),
    "experts.packed": (
        "experts.backends", "experts.calibrations", "experts.daemon_threads", "experts.errors", "experts.expert",
        "experts.filesystem", "experts.labels", "experts.llm.program",
    ),
    "experts.llm.importing": (
        "experts.checkpoints", "experts.errors", "experts.filesystem", "experts.llm.checkpoint", "experts.llm.config",
    ),
    "experts.llm.training": (
        "experts.children", "experts.errors", "experts.filesystem", "experts.llm", "experts.llm.parallel",
    ),
    "experts.llm": ("experts.errors",),
    "experts.llm.text": ("experts.errors", "experts.llm.serving.generation"),
    "experts.llm.serving": ("experts.errors", "experts.expert", "experts.llm"),
    "experts.llm.parallel": (
        "experts.children", "experts.errors", "experts.expert", "experts.llm", "experts.llm.serving.extents",
    ),
    "experts.llm.tiers": ("experts.daemon_threads", "experts.errors", "experts.llm"),
    "agent.faults": (),
    "agent.line_file": (),
    "agent.environment": ("agent.line_file",),
    "agent.config": ("agent.environment", "agent.line_file"),
    "agent.lines": ("agent.config", "agent.line_file", "agent.cluster"),
    "agent.subject": ("agent.line_file",),
    "agent.places": (),
    "agent.core": (),
    "agent.runtime.machine": ("agent.core",),
    "agent.runtime.expert_copy": ("agent.core",),
    "agent.runtime.images": ("agent.core", "agent.runtime.expert_copy", "agent.runtime.machine"),
    "agent.runtime.weights": ("agent.core", "agent.runtime.expert_copy", "agent.runtime.machine"),
    "agent.runtime": (
        "agent.core", "agent.runtime.expert_copy", "agent.runtime.images", "agent.runtime.machine",
        "agent.runtime.weights",
    ),
    "agent.runtime.measuring": ("agent.core", "agent.runtime", "agent.device_profile.records"),
    "agent.runtime.workers": ("agent.core", "agent.runtime"),
    "agent.cluster": ("agent.line_file", "agent.runtime"),
    "agent.device_profile": ("agent.core", *NOUNS),
    "agent.deployment": (
        "agent.config", "agent.environment", "agent.line_file", "agent.core", "agent.runtime",
        "agent.device_profile", "agent.cluster",
    ),
    "agent.sources.base": ("agent.config", "agent.subject"),
    "agent.sources.folder.files": ("agent.config", "agent.line_file", "agent.subject"),
    "agent.sources.folder": (
        "agent.config", "agent.line_file", "agent.subject", "agent.sources.base", "agent.sources.folder.files",
    ),
    "agent.sources.cameras.pictures": (),
    "agent.sources.cameras": (
        "agent.config", "agent.environment", "agent.line_file", "agent.subject", "agent.sources.base",
        "agent.sources.cameras.pictures",
    ),
    "agent.sources": (
        "agent.config", "agent.line_file", "agent.subject", "agent.sources.base", "agent.sources.folder",
        "agent.sources.cameras",
    ),
    "agent.records": ("agent.config", "agent.line_file", "agent.subject"),
    "agent.records.delivery": ("agent.config", "agent.environment", "agent.line_file", "agent.records"),
    "agent.records.truth": ("agent.config", "agent.records"),
    "agent.records.station": ("agent.config", "agent.line_file", "agent.records"),
    "agent.records.retention": ("agent.config", "agent.line_file", "agent.records"),
    "agent.doors": ("agent.config", "agent.environment", "agent.line_file", "agent.subject"),
    "agent.doors.proto": (),
    "agent.doors.grpc": ("agent.doors", "agent.line_file", "agent.subject"),
    "agent.doors.http": ("agent.doors", "agent.config", "agent.line_file"),
    "agent.doors.http.inference": ("agent.doors", "agent.line_file"),
    "agent.doors.http.station": ("agent.doors",),
    "agent.doors.http.texts": ("agent.doors",),
    "agent.doors.http.metrics": ("agent.doors",),
    "agent.doors.http.pages": ("agent.doors.http.door", "agent.doors.http.routes"),
    "agent.service.inspections": (
        "agent.config", "agent.line_file", "agent.subject", "agent.core", "agent.runtime", "agent.deployment",
        "agent.sources.base", "agent.records", "agent.doors.desk", "agent.doors.http.metrics.readings",
    ),
    "agent.service.texts": (
        "agent.subject", "agent.core", "agent.runtime", "agent.deployment", "agent.doors.desk",
        "agent.doors.refusals", "agent.doors.http.metrics.readings", "agent.service.inspections",
    ),
    "agent.service.desk": (
        "agent.config", "agent.line_file", "agent.subject", "agent.core", "agent.runtime", "agent.deployment",
        "agent.records", "agent.doors.desk", "agent.doors.http.metrics.readings", "agent.service.inspections",
        "agent.service.texts",
    ),
    "agent.service.station": (
        "agent.config", "agent.lines", "agent.core.performance", "agent.core.pool",
        "agent.core.state",
        "agent.runtime", "agent.deployment", "agent.sources.folder.files", "agent.records", "agent.doors.access",
        "agent.doors.desk", "agent.doors.http.operations", "agent.doors.http.session", "agent.doors.http.station",
        "agent.service.desk", "agent.service.inspections", "agent.service.texts",
    ),
    "agent.service": (
        "agent.config", "agent.environment", "agent.line_file", "agent.subject", "agent.core",
        "agent.runtime", "agent.device_profile",
        "agent.deployment", "agent.lines", "agent.sources", "agent.records", "agent.doors",
    ),
    "agent.commands": (
        "agent.config", "agent.environment", "agent.lines", "agent.line_file", "agent.subject", "agent.core",
        "agent.runtime", "agent.device_profile",
        "agent.deployment", "agent.lines", "agent.records", "agent.sources.cameras", "agent.doors.desk",
        "agent.doors.grpc.client", "agent.doors.http.client",
    ),
    "agent.commands.adding": (
        "agent.config", "agent.line_file", "agent.runtime.images.sources", "agent.deployment.packed_copies",
        "agent.commands.judged_images", "agent.commands.progress", "agent.commands.proving",
    ),
    "agent.commands.rejudging": (
        "agent.config", "agent.line_file", "agent.subject", "agent.core.request", "agent.runtime.images.sources",
        "agent.runtime.requests", "agent.deployment.build", "agent.deployment.worker_manager", "agent.records",
        "agent.sources.folder.files", "agent.lines",
    ),
    "agent.commands.reviewing": (
        "agent.config", "agent.records", "agent.runtime.images.sources", "agent.commands.rejudging.archive",
    ),
    "agent.demo.rendering": (),
    "agent.demo.training": ("agent.demo.rendering",),
    "agent.demo.texts": ("agent.demo.training.learning",),
    "agent.demo": (
        "agent.config", "agent.line_file", "agent.demo.rendering", "agent.demo.training", "agent.demo.texts",
        "agent.runtime", "agent.records", "agent.deployment", "agent.service", "agent.doors.desk",
    ),
    "profiler.charts": (),
    "profiler.tables": (),
    "profiler.workload": (),
    "profiler.simulation": ("profiler.workload",),
    "profiler.replay": ("profiler.workload",),
    "profiler.microbench": ("profiler.workload",),
    "profiler.usage": ("profiler.workload",),
    "profiler.thresholds": ("profiler.charts", "profiler.workload"),
    "profiler.allocation": ("profiler.workload", "profiler.simulation", "profiler.replay"),
    "profiler.profiling": (
        "profiler.charts", "profiler.tables", "profiler.workload", "profiler.replay", "profiler.microbench",
        "profiler.usage", "profiler.allocation",
    ),
    "profiler.planning": ("profiler.tables", "profiler.workload", "profiler.simulation"),
    "profiler.bench": (
        "profiler.tables", "profiler.workload", "profiler.simulation", "profiler.replay",
    ),
    "proof.paper": (),
    "proof.parts": ("proof.paper.tasks",),
    "proof.llm": (),
    "proof.compute": (),
    "proof.distillation": (),
    "proof.mesh": (),
    "proof.cluster": ("proof.paper.devices",),
}  # fmt: skip
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
    Rule("ultralytics is one detector's business", ("",), ("ultralytics",), exempt=("experts.backends.detector",)),
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


STARTS = re.compile(r"\bos\.(fork|posix_spawn|exec|spawn|system|popen)|\bcreate_subprocess_")
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


class TestTheSources:
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

    def test_only_the_configuration_and_the_detector_set_the_environment(self):
        setters = {module_name(path) for path in source_files() if _uses(path, sets=True)}
        assert setters <= {"agent.environment", "experts.backends.detector"}

    def test_only_one_room_forks_and_executes(self):
        starters = {module_name(path) for path in source_files() if STARTS.search(source_of(path))}
        assert starters == {"experts.children.bounded"}

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


class TestTheRooms:
    @pytest.mark.parametrize("layer", ["experts", "agent", "profiler", "proof"])
    def test_each_folder_is_a_room_with_a_rule(self, layer):
        of_backends = {
            f"experts.backends.{name}" for name in ("forms", "onnx", "onednn", "ort")
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


class TestTheImportRules:
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
            ("experts.backends.detector", "from ultralytics import YOLO\nimport torch"),
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


def test_torchs_threads_are_counted_in_one_place():
    """torch.set_num_threads alone does not keep: see agent.runtime.machine.threads. The demo sets its whole process's.

    oneDNN is asked for layouts on threads that were made for it, and end with the question.
    """
    setters = {module_name(path) for path in source_files() if "set_num_threads" in path.read_text()}
    assert setters == {
        "agent.runtime.machine.threads",
        "agent.demo.training.learning",
        "experts.backends.onednn.operators",
    }


def test_state_of_a_line_is_read_in_one_place():
    readers = {module_name(path) for path in source_files() if "tally.statistics()" in path.read_text()}
    assert readers == {"agent.service.desk.line_state"}


def test_json_of_a_verdict_is_parsed_in_one_place():
    """``detail`` of a row: its keys are fields everywhere else."""
    keys = re.compile(
        r"""detail(\[|\.get\()|json\.loads\(\w+\["detail"\]\)|step(\[|\.get\()"(boxes|model_sha256|unproven)"""
    )
    readers = {module_name(path) for path in source_files() if keys.search(path.read_text())}
    assert readers == {"agent.records.verdict"}
