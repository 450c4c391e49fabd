"""Boards judged on an executor that also reads and writes texts: how much longer they wait than alone.

The agent is that of ``coserve serve``. A board is a few images of one expert, given at once. Beside texts, TEXTS are
always under way, so boards meet prompts and tokens alike. The promise: an image waits for a quantum of texts, or an
iteration where that takes longer, for each batch of images up to its own.
"""

from __future__ import annotations

import io
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import yaml
from PIL import Image

from agent.config import read_line
from agent.deployment.build import build_agent
from agent.line_file.texts import QUANTUM_S
from agent.runtime.images.sources import EncodedImage
from agent.runtime.texts import TextSource
from experts.errors import CoServeError
from experts.llm.serving.generation import GREEDY, TextRequest
from profiler.bench.measured import Target
from profiler.workload.generated_line import CLASSIFIER_LABELS, synthetic_pixels, write_experts
from proof.llm.figures import Figure, LlmFindings, median_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agent.runtime.loop import AgentLoop
    from experts.expert import Precision

IMAGES, PX, PAUSE_S, WARMING_UP = 4, 224, 0.1, 5  # of boards
TEXTS, TOKENS = 4, 32  # texts under way, and tokens that each writes
BATCHES = 2  # of a board: its first image may go alone
MODEL, CRASHED = "llm/texts", -1


def measure_beside_images(folder: Path, weights: Path, precision: Precision, prompt: int, boards: int) -> LlmFindings:
    """Waits of so many boards alone, then beside texts of ``prompt`` tokens. Raises CoServeError if one fails."""
    folder.mkdir()
    (expert,) = write_experts(folder, "resnet18", 1, (PX, PX))
    of_images = {"architecture": "resnet18", "weights": str(expert.weights), "labels": list(CLASSIFIER_LABELS)}
    of_texts = {"architecture": "llm", "weights": str(weights), "precision": str(precision)}
    line = {
        "line": "bench-beside-images", "state": "./state", "executors": {"cpu": 1},
        "experts": {expert.id: of_images | {"input": {"size": [PX, PX]}}, MODEL: of_texts},
        "routes": {"part": [{"expert": expert.id, "pass": [CLASSIFIER_LABELS[0]]}]},
    }  # fmt: skip
    (folder / "line.yaml").write_text(yaml.safe_dump(line), "utf-8")
    ends = SimpleQueue[tuple[int, str | None]]()
    config = read_line(folder / "line.yaml", environment={})
    agent = build_agent(config, lambda number, outcome: ends.put((number, outcome.label)), lambda *_: None)
    agent.loop.when_crashed(lambda _: ends.put((CRASHED, None)))
    agent.start()
    try:
        waits_s = [_waits_s(agent.loop, ends.get, texts, prompt, boards) for texts in (0, TEXTS)]
    finally:
        agent.stop()
    part, figures = f"a board of {IMAGES} images", list[Figure]()
    for way, each_s in zip(("alone", f"beside {TEXTS} texts"), waits_s, strict=True):
        figures.append(median_of(part, way, (1e3 * wait_s for wait_s in each_s), "ms"))
        figures.append(Figure(part, f"{way}, 99 of 100", 1e3 * float(np.quantile(each_s, 0.99)), "ms"))
    longer_s, most_s = max(waits_s[1]) - max(waits_s[0]), BATCHES * QUANTUM_S
    promised = f"at most {BATCHES} quanta, {1e3 * most_s:.0f} ms"
    what = f"{part}: longest wait beside texts, less that alone"
    target = Target(what, promised, f"{1e3 * longer_s:.0f} ms", longer_s <= most_s)
    return LlmFindings(tuple(figures), (target,))


def _waits_s(
    loop: AgentLoop, ended: Callable[[], tuple[int, str | None]], texts: int, prompt: int, boards: int
) -> list[float]:
    """Seconds from each board's images to its last answer, with ``texts`` under way."""
    chance, content, asked, waits_s = np.random.default_rng(0), io.BytesIO(), set[int](), list[float]()
    Image.fromarray(synthetic_pixels(chance, PX, PX)).save(content, "png")
    image = EncodedImage(content.getvalue(), "board.png", PX * PX)
    for _ in range(boards + WARMING_UP):
        while len(asked) < texts:
            text = TextRequest(tuple(chance.integers(1, 1000, prompt).tolist()), TOKENS, GREEDY)
            asked.add(loop.submit(TextSource(lambda _, text=text: text), expert=MODEL))  # type: ignore[misc]  # bound now
        time.sleep(chance.uniform(0.5, 1.5) * PAUSE_S)
        began_s = time.monotonic()
        waiting = {loop.submit(image, component="part") for _ in range(IMAGES)}
        while waiting:
            number, label = ended()
            if label is None:
                raise CoServeError("an image or a text of the benchmark was not answered")
            waiting.discard(number)
            asked.discard(number)
        waits_s.append(time.monotonic() - began_s)
    return waits_s[WARMING_UP:]
