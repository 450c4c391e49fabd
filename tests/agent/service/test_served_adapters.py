"""Adapters of one base as experts of a served line."""

import json
import shutil

from safetensors.torch import save_file

from agent.doors.desk import TextOrder
from experts.expert import Expert
from experts.llm.files.program import read_program
from experts.llm.serving.family import ModelFamily
from experts.llm.serving.generation import GREEDY
from experts.llm.text.tokenizer import TextModel
from tests.agent.service.language_models import Held, Reader, config_of, random_tensors
from tests.experts.conftest import bound
from tests.experts.llm.adapters import write_adapter
from tests.experts.llm.conftest import greedy
from tests.experts.llm.text.conftest import byte_level

PROMPT = (7, 3, 40, 8)


def test_adapters_and_their_base_write_in_one_batch_what_each_writes_alone(text_line, models, tmp_path, monkeypatch):
    base = shutil.copytree(models / "code", tmp_path / "base")
    config = config_of(byte_level()) | {"hidden_size": 256, "intermediate_size": 512}
    tensors = random_tensors(config, 0)
    (base / "config.json").write_text(json.dumps(config))
    save_file(tensors, base / "model.safetensors")
    folders = {"llm/base": None, "llm/a": tmp_path / "a", "llm/b": tmp_path / "b"}
    for seed, name in enumerate(("llm/a", "llm/b")):
        write_adapter(folders[name], tensors, seed=seed)
    for name, folder in folders.items():
        adapter = {} if folder is None else {"adapter": str(folder)}
        text_line.document["experts"][name] = {"architecture": "llm", "weights": str(base), **adapter}
    together, hidden = [], ModelFamily.hidden
    monkeypatch.setattr(
        ModelFamily, "hidden", lambda self, *given: (together.append(len({*given[2]})), hidden(self, *given))[1]
    )
    readers = {name: Reader() for name in folders} | {"llm/base": Held()}
    with text_line.served() as service:
        for name, reader in readers.items():
            order = TextOrder(name, PROMPT, sampling=GREEDY, most_tokens=40)
            service.desk.generate(order, reader)
            assert name != "llm/base" or reader.has_read.wait(60), "the others come while it writes"
        readers["llm/base"].may_go_on.set()
        ends = {name: reader.wait() for name, reader in readers.items()}
        parents = {model.name: model.parent for model in service.desk.text_models()}
    assert max(together) == 3
    assert {name: parents[name] for name in folders} == {"llm/base": None, "llm/a": "llm/base", "llm/b": "llm/base"}
    for name, folder in folders.items():
        model = bound(Expert(name, "llm", base, (), None, adapter=folder)).model
        assert ends[name].written_tokens > 8
        expected = greedy(model, [list(PROMPT)], ends[name].written_tokens)[0][0]
        text = TextModel.of(read_program(base, name), name).decode(expected)
        assert readers[name].text.rstrip("\ufffd") == text.rstrip("\ufffd"), "but for a cut character at the end"
    assert len({reader.text for reader in readers.values()}) == 3
