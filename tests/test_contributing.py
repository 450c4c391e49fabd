"""The examples in CONTRIBUTING work as written: each keeps its contract."""

import asyncio
import logging
import re
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from agent.config import read_line
from agent.records.delivery import deliveries
from agent.records.outbox import Message
from agent.sources import registry
from agent.sources.base import Arrival, Source
from agent.subject import Subject
from tests.agent.sources.contract import ContractLine, keeps_the_contract

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
NAMES = {
    "Arrival": Arrival, "Path": Path, "Source": Source, "Subject": Subject, "UTC": UTC, "asyncio": asyncio,
    "asynccontextmanager": asynccontextmanager, "datetime": datetime, "log": logging.getLogger("contributing"),
}  # fmt: skip


def example(heading):
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


def test_example_source_of_the_page_works(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "SOURCES", [])
    exec(example("A new source"), NAMES | {"SOURCES": registry.SOURCES})
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "golden.png")
    (tmp_path / "f.yaml").write_text("{weight_bytes: 1000, label: ok}")
    (tmp_path / "line.yaml").write_text(
        "line: test\nstate: ./state\n"
        "experts:\n  cls/f: {architecture: fake, weights: f.yaml, labels: [ok], input: {size: [8, 8]}}\n"
        "routes:\n  resistor-0402: [{expert: cls/f, pass: [ok]}]\n"
    )
    line = ContractLine(read_line(tmp_path / "line.yaml", {}))
    keeps_the_contract(lambda one: registry.sources_of(one.config, one)[0], line)


def test_example_delivery_of_the_page_works(monkeypatch, caplog):
    monkeypatch.setattr(deliveries, "RECEIVERS", [])
    exec(example("A new delivery"), NAMES | {"RECEIVERS": deliveries.RECEIVERS})
    config = SimpleNamespace(outbox=None)
    (receiver,) = deliveries.line_receivers(config)

    async def deliver():
        async with receiver.connected() as connection:
            await connection.deliver(Message("id-1", "board", "B1", "{}"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connection.lost(), 0.01)

    with caplog.at_level(logging.INFO):
        asyncio.run(deliver())
    assert "id=id-1" in caplog.text
