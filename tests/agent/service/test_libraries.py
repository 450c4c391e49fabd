"""Libraries of a process that serves: those that its line needs, and no others."""

import numpy as np
import yaml
from PIL import Image

from profiler.workload.generated_line import LineRecipe, generate_line
from tests.waiting import until

RECIPE = LineRecipe(
    classifiers=1, architecture="resnet18", requests=1, memory_for=1, classifier_px=64, images=1, precision="fp32"
)
ABSENT = ("torch._dynamo", "triton", "onnx", "onnxruntime", "tokenizers", "ultralytics")
SERVED = f"""
import atexit, sys
assert not {{*{ABSENT}}} & set(sys.modules)
atexit.register(lambda: print("LOADED", sorted({{*{ABSENT}}} & set(sys.modules))))
from coserve import main
main()
"""


def test_process_that_judged_has_no_compiler_and_no_library_of_other_lines(forks, tmp_path):
    line = generate_line(tmp_path / "line", RECIPE).line
    document = yaml.safe_load(line.read_text())
    inbox = line.parent / "inbox"
    inbox.mkdir()
    pattern = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"
    document["intake"] = {"folders": [{"path": "./inbox", "pattern": pattern}]}
    line.write_text(yaml.safe_dump(document, sort_keys=False))
    (component,) = document["routes"]
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(inbox / f"b_{component}_1.png")
    agent = forks.start(SERVED, "serve", line)
    until(lambda: [*inbox.glob("done/**/*.png"), *inbox.glob("ng/**/*.png")] or agent.poll() is not None)
    agent.send_signal(15)
    ended = agent.wait(60)
    assert (ended.returncode, "LOADED []" in ended.stdout) == (0, True), ended
