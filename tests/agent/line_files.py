"""Line files of tests, and agents of them."""

import json
from contextlib import contextmanager

import pytest
import yaml

from agent.config import read_line
from agent.deployment.build import AgentOptions, build_agent
from experts.errors import ConfigError


def expert(weights, architecture="fake", side=8, **keys):
    return {
        "architecture": architecture,
        "weights": weights,
        "labels": ["ok", "bad"],
        "input": {"size": [side, side]},
    } | keys


def fake(file, weight_bytes=1_000_000, **declared):
    """Write the file of a fake expert."""
    file.write_text(json.dumps({"weight_bytes": weight_bytes, "label": "ok", "workspace_bytes": 1000} | declared))


def route(*names, passing=("ok",)):
    return [{"expert": name, "pass": list(passing)} for name in names]


def fakes(count, weights="fake.yaml", **keys):
    """Experts cls/f0, cls/f1... and a route c0, c1... to each. ``weights``: may have a place for the number."""
    return {
        "experts": {f"cls/f{number}": expert(weights.format(number), **keys) for number in range(count)},
        "routes": {f"c{number}": route(f"cls/f{number}") for number in range(count)},
    }


class LineFile:
    """A line whose ``document`` a test changes before it reads ``config``."""

    def __init__(self, folder, **document):
        self.folder = folder
        self.file = folder / "line.yaml"
        self.document = {"line": "test", "state": "./state"} | document

    def write(self, **keys):
        self.file.write_text(yaml.safe_dump(self.document | keys))
        return self.file

    @property
    def config(self):
        return read_line(self.write(), {})

    @contextmanager
    def built(self, *, starts=False, **options):
        """An agent, its outcomes by request and the stages that it went through; stopped in the end."""
        outcomes, stages = {}, []
        told = AgentOptions(**options)
        agent = build_agent(self.config, outcomes.__setitem__, lambda stage, *_: stages.append(stage), told)
        try:
            if starts:
                agent.start()
            yield agent, outcomes, stages
        finally:
            agent.stop()

    def refusal(self, **changes):
        """The error at the start of an agent of this line."""
        with pytest.raises(ConfigError) as caught:
            build_agent(self.config.model_copy(update=changes), lambda *_: None, lambda *_: None)
        return str(caught.value)


class ThreeFakes(LineFile):
    """Fakes cls/f0 to cls/f2 of three kinds, with a route each; c2 has two steps."""

    def __init__(self, folder, **sections):
        super().__init__(folder, **fakes(3, "f{}.yaml") | sections)
        self.document["routes"]["c2"] = route("cls/f0", "cls/f2")
        for number in range(3):
            fake(folder / f"f{number}.yaml", 1_000_000 + number)


def line_of(folder, text, **environment):
    (folder / "line.yaml").write_text(text)
    return read_line(folder / "line.yaml", environment)


def problems_of(folder, text, **environment):
    with pytest.raises(ConfigError) as caught:
        line_of(folder, text, **environment)
    return [str(problem).removeprefix(f"{folder}/") for problem in caught.value.problems]
