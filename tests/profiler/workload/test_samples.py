"""Samples of a line: whose they are, which are chosen, and what is said where there are none."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from experts.errors import ConfigError
from profiler.workload.samples import MOST_CALIBRATING, MOST_IN_MIX, MOST_PER_EXPERT, LineSamples, described
from tests.pictures import saved
from tests.profiler.lines import fakes, write_line

PATTERN = r"(?P<board>[^_]+)_(?P<component>[^_]+)_(?P<ref>[^.]+)\.png"


@pytest.fixture
def config(tmp_path):
    """Two components, each seen by its own expert, and then by one that they share."""
    return line_with(tmp_path, path="inbox", pattern=PATTERN)


def line_with(folder, parts=("resistor", "chip"), **intake):
    expert, step = fakes(1)["experts"]["cls/f0"], {"pass": ["ok"]}
    document = {
        "line": "one",
        "state": "state",
        "experts": {f"cls/{name}": expert for name in (*parts, "solder", "lonely")},
        "routes": {name: [{"expert": f"cls/{name}", **step}, {"expert": "cls/solder", **step}] for name in parts},
        "intake": {"folders": [intake]},
    }
    return write_line(folder, document)


def write_image(path, side=8):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((side, side, 3), 90, np.uint8)).save(path)
    return path


def names(samples):
    return [sample.path.name for sample in samples]


class TestLabelledCrops:
    @pytest.fixture
    def crops(self, tmp_path):
        for component, label, count in [("resistor", "ok", 40), ("resistor", "bad", 3), ("chip", "ok", 5)]:
            for number in range(count):
                write_image(tmp_path / "crops" / component / label / f"{component}-{label}-{number:02}.png")
        (tmp_path / "crops" / "chip" / "bodies.json").write_text("{}")
        return tmp_path / "crops"

    def test_each_beginning_of_a_components_mix_has_its_folders_shares_without_broken_images(self, config, tmp_path):
        for label, count in (("bad", 30), ("ok", 270)):
            for number in range(count):
                write_image(tmp_path / "mixed" / "chip" / label / f"{number:03}.png")
        mix = LineSamples.find(config, tmp_path / "mixed").mix
        assert {component: len(samples) for component, samples in mix.items()} == {"chip": MOST_IN_MIX}
        for count in (10, 50, MOST_IN_MIX):
            assert abs(sum(each.label == "bad" for each in mix["chip"][:count]) - count / 10) <= 1
        broken = mix["chip"][0].path
        broken.write_bytes(b"\x89PNG cut")
        found = LineSamples.find(config, tmp_path / "mixed")
        assert broken not in {each.path for each in found.mix["chip"]}

    def test_samples_are_drawn_equally_from_rare_labels_and_every_component(self, tmp_path):
        config = line_with(tmp_path, [f"part-{number:02}" for number in range(60)], path="inbox", pattern=PATTERN)
        for number in range(60):
            write_image(tmp_path / "crops" / f"part-{number:02}" / "ok" / "1.png")
            write_image(tmp_path / "crops" / f"part-{number:02}" / "ok" / "2.png")
        for number in range(30):
            write_image(tmp_path / "crops" / "part-59" / "bad" / f"{number}.png")
        drawn = LineSamples.find(config, tmp_path / "crops").of("cls/solder")
        assert len(drawn) == 2 * 60
        assert len({each.component for each in drawn}) == 60
        assert Counter(each.label for each in drawn) == {"bad": 30, "ok": 90}
        assert len(LineSamples.find(config, tmp_path / "crops").of("cls/part-59")) == 32

    def test_broken_samples_are_skipped_and_counted(self, config, crops):
        for number in range(4):
            (crops / "chip" / "ok" / f"chip-ok-{number:02}.png").write_bytes(b"\x89PNG cut")
        found = LineSamples.find(config, crops)
        assert names(found.of("cls/chip")) == ["chip-ok-04.png"]
        assert len(found.broken) == 4
        assert all("chip-ok-0" in reason for reason in found.broken)


class TestCalibratingImages:
    def test_images_in_the_agents_folders_are_divided_evenly_for_calibration(self, config, tmp_path):
        for number in range(4):
            write_image(tmp_path / "inbox" / "done" / f"B{number}_chip_U1.png")
            write_image(tmp_path / "inbox" / "ng" / f"B{number}_chip_U2.png")
        samples = LineSamples.find(config)
        for half in (samples.calibrating["cls/chip"], samples.held_out().of("cls/chip")):
            assert Counter(sample.folder for sample in half) == {"inbox/done": 2, "inbox/ng": 2}

    def test_digest_of_held_out_samples_covers_the_calibrating_ones(self, config, tmp_path):
        for label in ("ok", "bad"):
            for number in range(60):
                write_image(tmp_path / "crops" / "resistor" / label / f"{number:03}.png")
        samples, again = (LineSamples.find(config, tmp_path / "crops") for _ in range(2))
        experts = ("cls/resistor",)
        before = [each.sha256(experts) for each in (samples, samples.held_out())]
        assert before == [each.sha256(experts) for each in (again, again.held_out())]
        write_image(samples.calibrating["cls/resistor"][0].path, side=9)
        assert samples.sha256(experts) == before[0] != samples.held_out().sha256(experts) != before[1]

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
    @given(
        counts=st.dictionaries(
            st.tuples(st.sampled_from(["resistor", "chip"]), st.sampled_from(["ok", "bad", "odd"])),
            st.integers(1, 30),
            min_size=1,
        ),
        most=st.integers(1, MOST_PER_EXPERT),
    )
    def test_no_image_is_in_both_halves_and_labels_are_even(self, config, tmp_path_factory, counts, most):
        folder = tmp_path_factory.mktemp("crops")
        for (component, label), count in counts.items():
            for number in range(count):
                write_image(folder / component / label / f"{number}.png", side=1)
        samples = LineSamples.find(config, folder, most)
        check_apart(samples)
        assert samples == LineSamples.find(config, folder, most)
        for chosen in samples.calibrating.values():
            assert len(chosen) == len(set(chosen)) <= MOST_CALIBRATING
            shown = Counter((each.component, each.label) for each in chosen)
            assert all(2 * number <= counts[group] for group, number in shown.items())
            labels, halves = Counter(each.label for each in chosen), Counter()
            for component, label in shown:
                halves[label] += counts[component, label] // 2
            rarer = [number for label, number in labels.items() if halves[label] > number]
            components = len({component for component, _ in shown})
            assert not rarer or max(labels.values()) <= min(rarer) + components or len(chosen) < MOST_CALIBRATING


def check_apart(samples):
    """Nobody is judged by an image that it was calibrated on, and whoever is calibrated can be judged."""
    for expert, held_out in samples.held_out().by_expert.items():
        assert held_out
        assert not {each.path for each in held_out} & {each.path for each in samples.calibrating[expert]}


class TestIntake:
    def test_judged_and_waiting_images_of_the_line_are_samples(self, config, tmp_path):
        write_image(tmp_path / "inbox" / "done" / "2026-05-01" / "B1_resistor_R1.png")
        write_image(tmp_path / "inbox" / "ng" / "2026-05-01" / "B1_resistor_R2.png")
        write_image(tmp_path / "inbox" / "B1_chip_U1.png")
        found = LineSamples.find(config)
        assert sorted(names(found.of("cls/resistor"))) == ["B1_resistor_R1.png", "B1_resistor_R2.png"]
        assert names(found.of("cls/chip")) == ["B1_chip_U1.png"]
        assert described(found.of("cls/resistor")) == "2 images from inbox/done and inbox/ng"
        assert described(found.of("cls/chip")) == "1 image from inbox"

    def test_ng_files_are_half_of_the_samples_though_they_are_rare(self, config, tmp_path):
        for number in range(200):
            shelf = "done" if number % 20 else "ng"
            write_image(tmp_path / "inbox" / shelf / "2026-05-01" / f"B{number:03}_chip_U1.png")
        for folder in (None, tmp_path / "inbox"):
            drawn = LineSamples.find(config, folder).of("cls/chip")
            assert len(drawn) == MOST_PER_EXPERT
            assert Counter(each.path.parts[-3] for each in drawn) == {"done": 30, "ng": 10}

    def test_failed_unfinished_or_hidden_files_are_no_samples(self, config, tmp_path):
        for name in ("failed/B1_chip_U1.png", ".work/me/B1_chip_U1.png", "B1_chip_U1.png.part", ".B1_chip_U1.png"):
            write_image(tmp_path / "x.png").rename(_made(tmp_path / "inbox" / name))
        assert LineSamples.find(config).by_expert == {}

    def test_images_too_large_for_their_intake_are_no_samples(self, tmp_path):
        config = line_with(tmp_path, path="inbox", pattern=PATTERN, max_pixels=100)
        write_image(tmp_path / "inbox" / "B1_chip_U1.png", side=11)
        write_image(tmp_path / "inbox" / "B1_chip_U2.png", side=10)
        found = LineSamples.find(config)
        assert [(sample.path.name, sample.max_pixels) for sample in found.of("cls/chip")] == [("B1_chip_U2.png", 100)]

    def test_images_described_by_a_sidecar_are_samples(self, tmp_path):
        config = line_with(tmp_path, path="inbox", identity="sidecar")
        for name in ("done/2026-05-01/x.png", "new.png", "silent.png", "wrong.png", "cut.png"):
            write_image(tmp_path / "inbox" / name)
        said = json.dumps({"board": "B1", "component": "chip", "ref": "U1"})
        for name in ("done/2026-05-01/x.json", "new.json"):
            (tmp_path / "inbox" / name).write_text(said)
        (tmp_path / "inbox" / "wrong.json").write_text("[]")
        (tmp_path / "inbox" / "cut.json").write_text(said[:-1])
        found = LineSamples.find(config)
        assert {sample.path.name for sample in found.of("cls/chip")} == {"x.png", "new.png"}


class TestGivenFolders:
    def test_folder_without_a_usable_image_is_refused_with_the_reasons(self, config, tmp_path):
        folder = tmp_path / "wrong"
        for name in ("a.txt", "b.txt", "B1_diode_D1.png"):
            _made(folder / name).write_text("text")
        _made(folder / "B1_chip_U1.png").write_bytes(b"")
        with pytest.raises(ConfigError) as raised:
            LineSamples.find(config, folder)
        text = str(raised.value)
        assert f"{folder} holds no usable image: 4 files were looked at" in text
        assert "2 of them: the name does not match the pattern" in text
        assert "1 of them: no route for the component 'diode'" in text
        assert f"1 broken: {folder / 'B1_chip_U1.png'}: the file is empty" in text
        assert "<component>/<label>/*.png (components: chip, resistor, ...)" in text

    def test_table_gives_labels_and_components_as_folders_do(self, config, tmp_path):
        for name in ("1.png", "2.png", "3.png"):
            saved(tmp_path / "data" / name)
        rows = "file,label,component\n1.png,ok,chip\n2.png,bent,chip\n3.png,ok,\n"
        (tmp_path / "data" / "known.csv").write_text(rows)
        found = LineSamples.find(config, tmp_path / "data" / "known.csv")
        assert {(each.path.name, each.component, each.label) for each in found.of("cls/chip")} == {
            ("1.png", "chip", "ok"), ("2.png", "chip", "bent"),
        }  # fmt: skip


def _made(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
