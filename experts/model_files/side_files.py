"""Files beside a model that state its preprocessing: transformers' preprocessor_config.json, timm's config.json.

Guarantees: a file counts only if each of its keys is known, as what it states or as harmless; else nothing of it is
taken, and what it has is asked for by its name. Files count only in a folder with one model. The other exports in
UNREAD are named and not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from experts.checkpoints.facts import Facts
from experts.checkpoints.importing import is_checkpoint
from experts.checkpoints.preprocessing import fit_of, normalization_of
from experts.checkpoints.trainer_facts import PROBLEMS, FactCollector, labels_of, size_of
from experts.errors import WeightsRefused
from experts.model_files.description import unknown_fit, unserved_fit
from experts.model_files.image_processors import ProcessorFacts, of_image_processor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from experts.model_files.description import ModelDescription

UNNAMED = "LABEL_0"
PROCESSOR, CONFIG, TIMM = "preprocessor_config.json", "config.json", "pretrained_cfg"
PIXELS = ("size", "normalize", "fit", "orientation")
LENGTH_MAXIMUM = 1_000_000
UNREAD = {
    "environment.json": "Roboflow's export", "metadata.json": "Anomalib's export", "inference.yml": "PaddleX's export",
    "pipeline.json": "mmdeploy's export", "args.yaml": "ultralytics' training",
}  # fmt: skip
TIMM_STATED = frozenset({"architecture", "model_args", "global_pool", "label_names", TIMM})
TIMM_HARMLESS = frozenset({"num_classes", "num_features", "label_descriptions"})  # of weights, or of people
CFG_STATED = frozenset({"mean", "std", "input_size", "crop_pct", "crop_mode", "interpolation"})
CFG_HARMLESS = (
    frozenset(  # where pretrained weights come from, and how a head is replaced: timm 1.0, models/_pretrained
        {"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "custom_load"}
        | {"min_input_size", "fixed_input_size", "num_classes", "label_offset", "label_names", "label_descriptions"}
        | {"pool_size", "test_pool_size", "first_conv", "classifier", "license", "description", "origin_url"}
        | {"paper_name", "paper_ids", "notes"}
    )
)


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Content of the files beside a model, and the names of other exports' files."""

    processor: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: Path) -> SideFiles:
        folder = file.absolute().parent
        suffixes = {".onnx", ".safetensors"}
        models = {each.stem for each in folder.iterdir() if each.suffix in suffixes or is_checkpoint(each)}
        if len(models) > 1:
            return cls()
        unread = tuple(name for name in UNREAD if (folder / name).is_file())
        return cls(_table(folder / PROCESSOR), _table(folder / CONFIG), unread)

    def of_weights(self, file: Path, given: str | None, own: Facts | None = None) -> Facts:
        """A file's ``own`` facts with the architecture that timm names. ``given``: by the user.

        Raises WeightsRefused for layers that weights do not show.
        """
        name, own = self.config.get("architecture"), own or Facts()
        if not isinstance(self.config.get(TIMM), dict) or not isinstance(name, str) or own.architecture is not None:
            return own
        others = {key: self.config[key] for key in ("model_args", "global_pool") if self.config.get(key)}
        if others.get("global_pool") == "avg":
            del others["global_pool"]
        if others and given is None:
            raise WeightsRefused(
                str(file),
                f"is a {name} with {json.dumps(others)[:200]} ({CONFIG}), which may compute otherwise than "
                "torchvision's model of these weights: export it to ONNX, and add that, or say --architecture",
            )
        builder = None if others else "timm"  # which builds the model by its name
        plain = name.partition(".")[0]  # without the tag of its training
        evidence = {**own.evidence, "architecture": f"{CONFIG} architecture"}
        return replace(own, architecture=plain, builder=builder, evidence=evidence)


def with_side_facts(described: ModelDescription, side: SideFiles) -> ModelDescription:
    """Add what the files state where the model's own lacks it, and questions for what nothing states."""
    remarks = tuple(f"{name} ({UNREAD[name]}) lies beside it, and is not read" for name in side.unread)
    if described.kind == "detector":
        return replace(described, remarks=(*described.remarks, *remarks))
    facts, unclear = _collected(side, described.size)
    keys = (*PIXELS, "labels", *(("task",) if described.kind == "classifier" else ()))
    new = [key for key in keys if getattr(described, key) is None and key in facts.values]
    values = {
        key: facts.values[key] for key in new if key != "labels" or len(facts.values[key]) == described.label_count
    }
    missing = {key: why for key, why in described.missing.items() if key not in values}
    if described.fit is None and "fit" not in values and described.kind is not None:
        missing.setdefault("fit", unserved_fit(facts.evidence["fit"]) if facts.lacks("fit") else unknown_fit())
    if unclear:
        why = f"{'; '.join(unclear)}, which is not understood, and nothing of that file is taken: "
        missing |= {key: why + missing[key] for key in PIXELS if key in missing}
        remarks = (*remarks, *(f"{each}, which is not understood: nothing of that file was taken" for each in unclear))
    evidence = {**described.evidence, **{key: facts.evidence[key] for key in values}}
    return replace(described, **values, evidence=evidence, missing=missing, remarks=(*described.remarks, *remarks))


def _collected(side: SideFiles, size: tuple[int, int] | None) -> tuple[FactCollector, list[str]]:
    """Facts, and what is not understood."""
    facts = FactCollector()
    facts.add("size", size, "")
    found = of_image_processor(side.processor) if side.processor else ProcessorFacts({})
    for fact, stated in found.stated.items():
        facts.add_found(fact, stated, f"{PROCESSOR} ")
    unclear = [f"{PROCESSOR} has {each}" for each in found.unclear]
    if "model_type" in side.config:  # transformers', whose labels without names are LABEL_0, LABEL_1, ...
        names = labels_of(side.config.get("id2label")) or ()
        facts.add("labels", None if UNNAMED in names else names or None, f"{CONFIG} id2label")
        facts.add("task", PROBLEMS.get(str(side.config.get("problem_type"))), f"{CONFIG} problem_type")
    if isinstance(cfg := side.config.get(TIMM), dict):
        others = _unclear_timm(side.config, cfg)
        unclear += [f"{CONFIG} has {each}" for each in others]
        if not others:
            _add_timm(facts, side.config, cfg)
    return facts, unclear


def _unclear_timm(config: Mapping[str, Any], cfg: Mapping[str, Any]) -> list[str]:
    unclear = [str(key)[:100] for key in config if key not in TIMM_STATED | TIMM_HARMLESS and config[key] is not None]
    for key, value in cfg.items():
        other = {"test_input_size": cfg.get("input_size"), "test_crop_pct": cfg.get("crop_pct")}
        if value is not None and key not in CFG_STATED | CFG_HARMLESS and (key not in other or value != other[key]):
            unclear.append(f"{TIMM}.{str(key)[:100]}")
    return unclear


def _add_timm(collector: FactCollector, config: Mapping[str, Any], cfg: Mapping[str, Any]) -> None:
    where = f"{CONFIG} {TIMM}."
    collector.add("labels", labels_of(config.get("label_names")), f"{CONFIG} label_names")
    collector.add("size", size_of(cfg.get("input_size")), f"{where}input_size")
    collector.add_found("normalize", normalization_of(cfg), where)
    collector.add_found("fit", fit_of(cfg, collector.values.get("size")), where)
    collector.add("orientation", "stored", f"{CONFIG}: timm's loader takes pixels as stored")


def _table(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(LENGTH_MAXIMUM))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
