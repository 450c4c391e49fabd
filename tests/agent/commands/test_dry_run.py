"""`coserve doctor --as`: what a line gets on boxes that are not here, of one with images and texts."""

import json

import pytest

from agent.commands.dry_run import examine_as
from agent.config import read_line
from experts.backends.capabilities import capabilities_of
from experts.backends.vision.classifier import write_random_weights
from experts.errors import ConfigError
from tests.agent.line_files import LineFile, expert, fake, route
from tests.agent.service.language_models import write_models
from tests.commands import coserve

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("line")
    write_models(made)
    write_random_weights(made / "r.safetensors", "resnet18", class_count=2, seed=0)
    for name in ("code", "maths"):
        values = json.loads((made / name / "config.json").read_text())
        (made / name / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    return made


@pytest.fixture
def line(folder):
    fake(folder / "f.yaml", weight_bytes=100_000_000)
    experts = {
        "cls/f": expert("f.yaml"),
        "cls/r": expert("r.safetensors", architecture="resnet18", side=64),
        "llm/code": {"architecture": "llm", "weights": "code"},
        "llm/maths": {"architecture": "llm", "weights": "maths"},
    }
    made = LineFile(folder, experts=experts, routes={"c": route("cls/f", "cls/r")}, memory={"host": "2GiB"})
    return made.write


def found(line_file, box):
    return {check.name: check for check in examine_as(read_line(line_file, {}), box)}


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_gpu_gets_executors_memories_and_forms_and_nothing_is_written(line, folder):
    file = line()
    before = files(folder)
    checks = found(file, "cuda:sm_86:12GiB")
    assert files(folder) == before
    assert {name for name, check in checks.items() if check.fix is not None} == set()
    assert next(iter(checks.values())).found.startswith("as cuda:sm_86:12GiB: no device was asked")
    assert checks["executors"].found == "3 cuda, 1 cpu"
    assert checks["capabilities cuda"].found.startswith("multiplies fp32, fp16, bf16, tf32; has own memory, triton")
    assert checks["experts cuda"].found == "2 in bf16, 2 in fp32; language models: llm/code, llm/maths"
    assert checks["memory device"].found.startswith("10.8 GiB: experts 6.1 GiB, batches 2.1 GiB, keys and")
    assert "copies, which are 13" in checks["memory device"].found, "95 MiB of the fake, 43 of the ResNet18"
    assert "`coserve profile" in checks["only a profile tells"].found


def test_jetson_shares_one_memory_and_lacks_triton(line):
    cpu = capabilities_of("cpu")
    checks = found(line(memory={}), "jetson")
    assert capabilities_of("cpu") == cpu, "this box's again"
    assert checks["executors"].found == "2 cuda, 1 cpu"
    assert checks["capabilities cuda"].found.endswith("lacks own memory, triton")
    assert "memory device" not in checks
    assert checks["memory host"].found.startswith("9.6 GiB")
    assert checks["experts cpu"].found.startswith("4 in fp32")


def test_apple_gets_one_executor_without_a_cpu_beside_it(line):
    checks = found(line(memory={}), "mps:8GiB")
    assert (checks["executors"].found, checks["device"].found) == ("1 mps", "mps, processors mps")
    assert checks["memory host"].found.startswith("4.8 GiB")
    assert "lacks own memory, triton, pinned memory" in checks["capabilities mps"].found


def test_line_that_does_not_fit_is_refused_with_its_sizes(line, folder):
    fake(folder / "f.yaml", weight_bytes=GIB)
    refused = found(line(), "cuda:sm_86:1GiB")["experts.cls/f"]
    assert refused.found.startswith("needs 1024.")
    assert refused.fix.startswith("raise memory.device")
    done = coserve("doctor", line(), "--as", "cuda:sm_86:1GiB", "--json", check=1)
    answer = json.loads(done.stdout)
    assert (answer["dry_run"], answer["problems"]) == ("cuda:sm_86:1GiB", 1)


def test_keys_for_another_device_are_told(line):
    checks = found(line(device="cpu"), "jetson:8GiB")
    assert checks["device of the line"].fix.startswith("write `device: auto`")
    refused = found(line(executors={"cuda": 2}), "mps")["executors.cuda"]
    assert (refused.found, refused.fix) == ("this box has no 'cuda'", "use mps")


def test_unreadable_weights_are_told_beside_the_plan_of_the_others(line):
    experts = {"cls/f": expert("gone.yaml"), "cls/r": expert("r.safetensors", architecture="resnet18", side=64)}
    checks = found(line(experts=experts), "cuda:sm_86:12GiB")
    assert "gone.yaml is not there" in checks["expert cls/f"].found
    assert "1 copies" in checks["memory device"].found


@pytest.mark.parametrize("box", ["tpu", "cuda", "cuda:sm_86", "cuda:12GiB", "cuda:sm_8:12GiB", "jetson:sm_87:8GiB"])
def test_unknown_box_is_refused_with_the_known_ones(line, box):
    with pytest.raises(ConfigError, match=r"write cuda:sm_86:12GiB .*, jetson or jetson:16GiB, mps or mps:24GiB"):
        examine_as(read_line(line(), {}), box)
    with pytest.raises(ConfigError, match="'12' is not a size - write a number and a unit"):
        examine_as(read_line(line(), {}), "cuda:sm_86:12")
