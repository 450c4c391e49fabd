"""The repository around the sources: its commands exist, its installation repairs itself, its errors are one tree."""

import ast
import inspect
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from agent.faults import errors as agent_errors
from experts import errors

ROOT = Path(__file__).parents[1]
TREES = (errors, agent_errors)
OPEN_ENDS = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X]|HAC[K])\b")  # the brackets keep this line from finding itself
TEXT_SUFFIXES = {".py", ".toml", ".yaml", ".yml", ".md", ".sh", ".service", ".css", ".html", ".js", ".proto", ".cfg"}
FLOORS = ("experts", "agent", "profiler", "proof")
FOLDERS = (*FLOORS, ".ci", "configs", "packaging", "systemd", "tests")

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
NAMED_FILE = re.compile(r"`((?:agent|configs|docs|experts|packaging|profiler|proof|tests)/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
ROOM = re.compile(r"^( *)([\w-]+)/ +\S")  # of the drawing of the house, which steps two columns in for each folder


def absent_tests(markdown):
    """Tests, or files of them, that a text names and that do not exist."""
    return {
        f"{file}::{name}" if name else file
        for file, name in NAMED_TEST.findall(markdown)
        if not (ROOT / file).is_file()
        or (name and not re.search(rf"^ *def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE))
    }


def pages():
    """The project's pages: README, CONTRIBUTING and docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def absent_files(markdown, folder):
    """Files and folders that a page of this folder names or links to, and that do not exist."""
    named = {name for name in NAMED_FILE.findall(markdown) if not (ROOT / name).exists()}
    return named | {link for link in LINK.findall(markdown) if not (folder / link).exists()}


def drawn_rooms(markdown):
    """The folders of the house that a page draws, as paths."""
    rooms = set()
    above = []
    for fenced in re.findall(r"^```\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        for line in fenced.splitlines():
            if drawn := ROOM.match(line):
                del above[len(drawn[1]) // 2 :]
                above.append(drawn[2])
                rooms.add("/".join(above))
    return rooms


def make_targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def targets_named_in(markdown):
    """Make targets in fenced blocks and in inline code, not in prose ("make sure")."""
    fenced = re.findall(r"^```.*?^```", markdown, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`[^`\n]+`", markdown)
    return {word for code in (*fenced, *inline) for word in re.findall(r"\bmake (?:[A-Z]+=\S+ )*([a-z][a-z-]*)", code)}


def declared(key):
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][key]


def project_texts():
    inside = (path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file())
    texts = [path for path in inside if path.suffix in TEXT_SUFFIXES or path.parent.name == ".ci"]
    return [*texts, ROOT / "coserve.py", ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("*.md")]


class TestDocuments:
    def test_tests_of_the_forms_exist(self):
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "--dry-run", "test-forms"]  # which may itself run under `make test`
        told = subprocess.run(command, cwd=ROOT, env=outer, capture_output=True, text=True, timeout=60).stdout
        named = re.findall(r"\btests/[\w/.]+", told)
        assert named
        assert [name for name in named if not (ROOT / name).exists()] == []
        assert "ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2" in told

    @pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
    def test_page_names_only_what_exists(self, page):
        markdown = page.read_text("utf-8")
        assert targets_named_in(markdown) <= make_targets()
        assert absent_files(markdown, page.parent) == set()

    def test_missing_file_named_by_a_page_is_found(self):
        named = "`agent/core/` `agent/core/engine.py` `agent/gone.py` `experts/gone/` `cls/gone` `experts list`"
        linked = "[a](promises.md) [b](../README.md#licence) [c](gone.md) [d](https://a.example/gone.md)"
        assert absent_files(f"{named} {linked}", ROOT / "docs") == {"agent/gone.py", "experts/gone/", "gone.md"}

    def test_every_page_is_one_link_from_the_readme(self):
        links = set(LINK.findall((ROOT / "README.md").read_text("utf-8")))
        assert {str(page.relative_to(ROOT)) for page in pages() if page != ROOT / "README.md"} <= links

    def test_drawing_of_the_house_has_every_room(self):
        inits = (path for name in FLOORS for path in (ROOT / name).rglob("__init__.py"))
        there = {str(path.parent.relative_to(ROOT)) for path in inits}
        drawn = drawn_rooms((ROOT / "docs" / "architecture.md").read_text("utf-8"))
        assert {room for room in drawn if not room.startswith(("configs", "docs", "tests"))} == there

    def test_prose_is_not_taken_for_a_command(self):
        assert targets_named_in("make sure\n`make demo` `make VENV=x test`\n```\nmake lint\n```\n") == {
            "demo", "test", "lint",
        }  # fmt: skip

    def test_every_promise_names_existing_tests(self):
        promises = (ROOT / "docs" / "promises.md").read_text("utf-8")
        assert len(NAMED_TEST.findall(promises)) > 20
        assert absent_tests(promises) == set()

    def test_promise_without_its_test_is_found(self):
        named = (
            "`tests/test_project.py` `tests/test_project.py::absent_tests` `tests/gone.py` `tests/test_project.py::x`"
        )
        assert absent_tests(named) == {"tests/gone.py", "tests/test_project.py::x"}

    def test_no_open_ends(self):
        found = {
            f"{path.relative_to(ROOT)}:{number}"
            for path in project_texts()
            for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
            if OPEN_ENDS.search(line)
        }
        assert found == set()

    def test_licence_is_the_declared_one(self):
        assert declared("license") == "Apache-2.0"
        assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text("utf-8")

    def test_changelog_has_this_version(self):
        assert f"## [{declared('version')}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


class TestErrors:
    @pytest.mark.parametrize("tree", TREES)
    def test_docstring_draws_the_tree_of_errors(self, tree):
        assert drawn_tree(tree.__doc__) == {name: found.__bases__[0].__name__ for name, found in known(tree).items()}

    def test_every_exception_that_leaves_its_module_is_in_the_tree(self):
        elsewhere = {
            f"{path.relative_to(ROOT)}: {name}"
            for floor in FLOORS
            for path in (ROOT / floor).rglob("*.py")
            if path not in map(Path, (tree.__file__ for tree in TREES))
            for name in exceptions_defined_in(path.read_text("utf-8"), {name for tree in TREES for name in known(tree)})
        }
        assert elsewhere == set()

    def test_exception_defined_elsewhere_is_found(self):
        bases = {"Lost": "CoServeError", "Odd": "ValueError", "Plain": "Protocol", "_Own": "Exception"}
        source = "".join(f"class {name}({base}): ...\n" for name, base in bases.items())
        assert exceptions_defined_in(source, {"CoServeError"}) == ["Lost", "Odd"]


def known(tree):
    return {name: found for name, found in inspect.getmembers(tree, inspect.isclass) if issubclass(found, Exception)}


def drawn_tree(docstring):
    """The drawing of errors.py, child to parent; each level is three columns deeper."""
    tree = {}
    ancestors = []
    for line in docstring.splitlines():
        drawn = re.match(r"^((?:[| ]  )*)([+`]- )?([A-Z][A-Za-z]+)(\s{2,}|$)", line)
        if drawn is None:
            continue
        depth = len(drawn[1]) // 3 + (1 if drawn[2] else 0)
        del ancestors[depth:]
        tree[drawn[3]] = ancestors[-1] if ancestors else "Exception"
        ancestors.append(drawn[3])
    return tree


def exceptions_defined_in(source, known):
    """Names of the exceptions a source defines for others; one with a leading underscore stays inside its module."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    shared = [node for node in classes if not node.name.startswith("_")]
    return [node.name for node in shared if any(_is_exception(ast.unparse(base), known) for base in node.bases)]


def _is_exception(base, known):
    name = base.rpartition(".")[2]
    return name in known or name in {"Exception", "BaseException"} or name.endswith("Error")
