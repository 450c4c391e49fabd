"""`coserve experts verify`: experts compared with known answers, and who says that one is unproven."""

import json

import pytest

from agent.commands.doctor import examine
from agent.config import read_line
from agent.line_file.proofs import UNKNOWN_ANSWERS, kept_proofs, save_proof
from experts.backends.vision.classifier import write_random_weights
from experts.images import decode_image
from experts.proving.judging import Judge
from tests.agent.line_files import LineFile, expert, fake, route
from tests.commands import coserve
from tests.pictures import saved

IMAGES = 6


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr("agent.commands.doctor.READ_BYTES", 2**20)


@pytest.fixture
def line(tmp_path):
    fake(tmp_path / "f0.yaml", label=None)
    return LineFile(tmp_path, experts={"cls/f0": expert("f0.yaml")}, routes={"c0": route("cls/f0")})


def data_of(line, differing=0, name="cls/f0"):
    """A folder of an expert's own answers, as torchvision reads them, ``differing`` of them in the other label's."""
    described = line.config.catalog.experts[name]
    judge, folder = Judge(described), line.folder / f"data-{differing}"
    for number in range(IMAGES):
        file = saved(line.folder / f"{number}.png", (40 * number, 200 - 30 * number, 30))
        label = judge.answer(decode_image(file, file.name)).label
        if number < differing:
            (label,) = {*described.labels} - {label}
        (folder / label).mkdir(parents=True, exist_ok=True)
        file.rename(folder / label / file.name)
    return folder


def run_command(*words):
    result = coserve(*words)
    return result.exit_code, result.output


def proof_check(file):
    return next(each for each in examine(read_line(file, {})) if each.name == "proof")


def test_expert_is_unproven_for_every_command_until_it_agrees_with_known_answers(line):
    file = line.write()
    code, page = run_command("config", "check", file)
    assert (code, f"warning: 1 of 1 experts are unproven (cls/f0: {UNKNOWN_ANSWERS})" in page) == (0, True)
    assert json.loads(run_command("experts", "list", file, "--json")[1])["experts"][0]["unproven"] == UNKNOWN_ANSWERS
    assert "unproven" in run_command("experts", "list", file)[1]
    found = proof_check(file)
    assert (found.is_well, UNKNOWN_ANSWERS in found.found) == (True, True)
    not_packed = "--  cls/f0: not packed yet: the agent packs it when it starts\n"
    code, page = run_command("experts", "verify", file)
    assert (code, f"{not_packed}    unproven: {UNKNOWN_ANSWERS}\n" in page) == (0, True)

    code, page = run_command("experts", "verify", file, "cls/f0", "--check", data_of(line))
    assert (code, f"{not_packed}    6 of 6 known answers are the same in fp32" in page) == (0, True)
    assert read_line(file).catalog.experts["cls/f0"].check == line.folder / "checks" / "cls" / "f0"
    assert json.loads(run_command("config", "check", file, "--json")[1])["unproven"] == {}
    assert "  proven " in run_command("experts", "list", file)[1]
    assert proof_check(file).found == "every expert of images is proven by known answers"


def test_differing_answers_fail_the_command_and_are_named(line):
    file = line.write()
    code, page = run_command("experts", "verify", file, "cls/f0", "--check", data_of(line, differing=2))
    assert code == 1
    assert "BAD cls/f0" in page
    assert "4 of 6 known answers are the same in fp32" in page
    assert page.count("instead of") == 2
    assert (proof_check(file).fix, kept_proofs(line.folder / "state")[0].holds) == (
        f"coserve experts verify {file}",
        False,
    )
    trusted = kept_proofs(line.folder / "state")[0].model_copy(update={"why": "mislabelled", "by": "ann"})
    save_proof(line.folder / "state", trusted)
    code, page = run_command("experts", "verify", file)
    assert (code, "trusted by ann: mislabelled" in page) == (0, True)


def test_unreadable_known_image_of_one_expert_does_not_block_proofs_of_others(line):
    fake(line.folder / "f1.yaml", label=None)
    line.document["experts"]["cls/f1"] = expert("f1.yaml")
    line.document["routes"]["c1"] = route("cls/f1")
    data, file = data_of(line, name="cls/f1"), line.write()
    for name in ("cls/f0", "cls/f1"):
        run_command("experts", "verify", file, name, "--check", data)
    broken = next((line.folder / "checks" / "cls" / "f0").glob("*.png"))
    broken.write_bytes(b"no picture")
    code, page = run_command("experts", "verify", file)
    assert code == 1
    assert "BAD cls/f0" in page
    assert f"not compared with its known answers: {broken}: " in page
    assert "6 of 6 known answers are the same in fp32" in page.partition("cls/f1")[2]


def test_upgraded_library_is_reported_in_one_line_until_experts_are_verified(line, monkeypatch):
    file = line.write()
    run_command("experts", "verify", file, "cls/f0", "--check", data_of(line))
    monkeypatch.setattr("agent.line_file.proofs._versions", lambda: ("99",))
    found = proof_check(file)
    assert "other libraries" in found.found
    assert "\n" not in found.found
    assert found.fix == f"coserve experts verify {file}"
    assert run_command("experts", "verify", file)[0] == 0
    assert proof_check(file).is_well


def test_expert_is_verified_in_the_form_in_which_the_line_runs_it(tmp_path):
    entry = expert("a.safetensors", "shufflenet_v2_x0_5", side=64)
    line = LineFile(tmp_path, experts={"cls/f0": entry}, routes={"c0": route("cls/f0")}, precision="bf16")
    write_random_weights(tmp_path / "a.safetensors", "shufflenet_v2_x0_5", 2, seed=0, image_size=64)
    file = line.write()
    page = run_command("experts", "verify", file, "cls/f0", "--check", data_of(line), "--json")[1]
    rows = json.loads(page.partition("\n")[0])["experts"]
    assert [proof["form"] for proof in rows[0]["proofs"]] == ["bf16"]
    line.document["experts"]["cls/f0"]["check"] = "checks/cls/f0"
    line.document["precision"] = "fp32"
    assert "another form" in json.loads(run_command("config", "check", line.write(), "--json")[1])["unproven"]["cls/f0"]


def test_check_without_answers_or_of_an_unknown_expert_is_refused_by_name(line):
    line.document["experts"]["cls/f0"]["check"] = "checks/none"
    file = line.write()
    assert "checks/none: holds no labelled images" in run_command("experts", "verify", file)[1]
    code, page = run_command("experts", "verify", file, "cls/f1")
    assert (code, "no expert 'cls/f1' - did you mean 'cls/f0'?" in page) == (78, True)


def test_expert_added_without_known_answers_is_called_unproven(tmp_path):
    (tmp_path / "line.yaml").write_text("line: new\nstate: ./state\n")
    write_random_weights(tmp_path / "cls.safetensors", "shufflenet_v2_x0_5", 2, seed=0, image_size=64)
    options = {
        "labels": "ok,bad", "size": "64x64", "normalize": "unit", "fit": "stretched", "resample": "bilinear",
        "task": "multiclass", "variant": "plain", "component": "c0", "id": "cls/new",
    }  # fmt: skip
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    code, page = run_command("experts", "add", tmp_path / "line.yaml", tmp_path / "cls.safetensors", *given)
    assert code == 0, page
    verify = f"coserve experts verify {tmp_path / 'line.yaml'} cls/new --check DATA"
    assert f"unproven: {UNKNOWN_ANSWERS} - give them with `{verify}`" in page
