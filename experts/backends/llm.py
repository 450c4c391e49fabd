"""Language models: Hugging Face directories, of the families that ``experts.llm.files.config`` reads.

Tensors are packed under the model's own names, so models share equal ones (a backbone, embeddings). Texts run through
``LlmSkeleton.model`` in iterations (``experts.llm``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from experts.backends.base import Packable, WeightBytes
from experts.backends.forms import FORMS, form_of
from experts.backends.forms.plain import PlainForm
from experts.backends.outputs import is_finite
from experts.errors import WeightsCorrupt, WeightsMismatch
from experts.expert import Precision
from experts.llm.adapter import open_adapter
from experts.llm.files.checkpoint import open_checkpoint, unused_adapter
from experts.llm.files.config import read_spec
from experts.llm.files.names import EXPERTS, FINAL_NORM, HEAD, assemblies, expert_stacks
from experts.llm.files.program import pack_program, read_program, spec_of
from experts.llm.model import LanguageModel
from experts.llm.parallel.shape import shape_of
from experts.llm.parallel.slices import local_spec
from experts.llm.quant import BLOCK_BYTES, quantised_bytes
from experts.llm.scoped_attention import SCORES_AT_ONCE
from experts.llm.serving.readings import POSITIONS_AT_ONCE
from experts.llm.text.tokenizer import TOKENIZER, TextModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from torch import Tensor

    from experts.backends.base import Prepared
    from experts.expert import Expert, Prediction
    from experts.llm.adapter import StoredAdapter
    from experts.llm.dispatch import MoeExperts
    from experts.llm.files.checkpoint import Checkpoint
    from experts.llm.files.config import ArchSpec

log = logging.getLogger(__name__)
EXECUTABLE = tuple(name for name, form in FORMS.items() if not form.is_cpu_only)
PACKED_AS = "moe_experts in blocks"  # in manifests
PACKED_FOR_RANKS = "without weights, for ranks"
TOKENS_AT_ONCE = 512  # most tokens of prompts in an iteration
FP32_BYTES = 4
BLOCKS_BYTES = {Precision.INT8: BLOCK_BYTES, Precision.INT4: 2 * BLOCK_BYTES}  # int4: with the levels of a block


class LlmSkeleton:
    """One model over borrowed memory. ``model`` runs it."""

    def __init__(self, spec: ArchSpec) -> None:
        self._spec = spec
        self._model: LanguageModel | None = None

    @property
    def spec(self) -> ArchSpec:
        return self._spec

    @property
    def model(self) -> LanguageModel:
        """The model over the bytes that it is bound to. Raises ValueError before ``bind``."""
        if self._model is None:
            raise ValueError("the skeleton is bound to no memory yet")
        return self._model

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        self._model = LanguageModel(self._spec, tensors)

    def bind_offloaded(self, tensors: Mapping[str, Tensor], moe_experts: Mapping[int, MoeExperts]) -> None:
        """Bind the dense part alone; ``moe_experts`` run the experts of these layers."""
        self._model = LanguageModel(self._spec, tensors, moe_experts)

    def infer(self, expert: Expert, batch: Sequence[Prepared]) -> tuple[Prediction, ...]:
        raise ValueError(f"{expert.id} takes texts, not images")


class LlmBackend:
    """Implements ``experts.backends.base.Backend`` for language models."""

    precisions = frozenset(EXECUTABLE)

    def pack(self, expert: Expert, precision: Precision) -> Packable:
        form = form_of(precision)
        if not isinstance(form, PlainForm):
            raise WeightsMismatch(
                expert.id, f"language models do not run in {precision}: choose {', '.join(EXECUTABLE)}"
            )
        program, checkpoint, adapter = _opened(expert)
        if expert.parallel is not None:  # ranks read their slices from the directory
            tensors: Mapping[str, Tensor] = {FINAL_NORM: checkpoint.read(FINAL_NORM, form.dtype)}
            return Packable(tensors, pack_program(program))
        sources = (checkpoint,) if adapter is None else (checkpoint, adapter)
        tensors = form.text_tensors(_PackedTensors(expert.id, form, *sources))
        added = frozenset() if adapter is None else frozenset(adapter.names)
        return Packable(tensors, pack_program(program), expert_stacks(tensors), added=added)

    def check(self, expert: Expert) -> None:
        program, _, _ = _opened(expert)
        TextModel.of(program, expert.id)

    def template(self, expert: Expert, precision: Precision, program: bytes, device: str) -> object:
        return spec_of(program, expert.id)

    def skeleton(self, expert: Expert, precision: Precision, program: bytes, device: str) -> LlmSkeleton:
        return LlmSkeleton(spec_of(program, expert.id))

    def prepare(self, expert: Expert, image: np.ndarray) -> Prepared:
        raise ValueError(f"{expert.id} takes texts, not images")

    def recipe(self, expert: Expert, precision: Precision) -> str:
        if expert.parallel is not None:
            return PACKED_FOR_RANKS
        labels = f", for {', '.join(expert.labels)}" if expert.labels else ""  # their spelling is checked
        return PACKED_AS + (form.text_recipe if isinstance(form := form_of(precision), PlainForm) else "") + labels

    def weight_bytes(self, expert: Expert, precision: Precision) -> WeightBytes:
        """An adapter's own tensors are left out: they are a hundredth of its model."""
        spec, itemsize = read_spec(expert.weights, expert.id), form_of(precision).dtype.itemsize
        shapes = {each.name: each.shape for each in assemblies(spec)}
        sizes = {name: prod(shape) * itemsize for name, shape in shapes.items()}
        if precision in BLOCKS_BYTES:
            is_int4, is_tied = precision is Precision.INT4, HEAD not in shapes
            sizes |= quantised_bytes(shapes, itemsize, is_int4=is_int4, is_tied=is_tied)
        stacked = sum(size for name, size in sizes.items() if EXPERTS in name)
        blocks = sum(layer.moe.moe_experts for layer in spec.layers if layer.moe is not None)
        return WeightBytes(sum(sizes.values()) - stacked, stacked // max(blocks, 1), blocks)

    def workspace_bytes(self, expert: Expert, precision: Precision, batch_size: int) -> int:
        spec = read_spec(expert.weights, expert.id)
        block_bytes = BLOCKS_BYTES.get(precision, 0)
        return iteration_bytes(spec, form_of(precision).dtype.itemsize, batch_size) + block_bytes

    def token_bytes(self, expert: Expert, precision: Precision) -> int:
        return read_spec(expert.weights, expert.id).kv_bytes(form_of(precision).dtype.itemsize)


def _opened(expert: Expert) -> tuple[dict[str, bytes], Checkpoint, StoredAdapter | None]:
    """Program, and tensors of model and adapter by their headers, once all fit each other and the line file."""
    program = read_program(expert.weights, expert.id)
    _check_words(expert, program)
    checkpoint = open_checkpoint(expert.weights, expert.id, read_spec(expert.weights, expert.id))
    if (unused := unused_adapter(expert.weights, expert.adapter)) is not None:
        log.warning("adapter_unused expert=%s %s", expert.id, unused)
    checkpoint.check_tied_head()
    if expert.parallel is not None:
        local_spec(checkpoint.spec, shape_of(expert), expert.id)
    adapter = None if expert.adapter is None else open_adapter(expert.adapter, expert.id, checkpoint.spec)
    return program, checkpoint, adapter


def _check_words(expert: Expert, files: Mapping[str, bytes]) -> None:
    """Raises TokenizerUnusable, WeightsMismatch for a label without tokens. Tokens need no tokenizer."""
    if TOKENIZER not in files:
        return
    words = TextModel.of(files, expert.id)
    for label in expert.labels:
        if not _can_spell(words, label):
            raise WeightsMismatch(expert.id, f"{TOKENIZER} has no token for the label {label!r}: rename the label")


def _can_spell(words: TextModel, label: str) -> bool:
    try:
        return bool(words.encode(label, adds_special=False))
    except Exception:  # noqa: BLE001  a vocabulary without a token for unknown text raises a bare one
        return False


def iteration_bytes(spec: ArchSpec, itemsize: int, rows: int) -> int:
    """Bytes of TOKENS_AT_ONCE in the widest layer or, whichever is more, behind the last one beside the logits of
    POSITIONS_AT_ONCE; and of each row's mask and logits. Logits count twice in fp32."""
    widest = max(_layer_width(spec, number) for number in range(len(spec.layers)))
    per_token = (4 * spec.hidden_size + 2 * (spec.query_size + 2 * spec.kv_size)) * itemsize
    joined = spec.query_size * (3 * itemsize + 3 * FP32_BYTES)  # attention of a chunk and of the positions before it
    scores = 0 if spec.is_attention_plain else 4 * FP32_BYTES * max(SCORES_AT_ONCE, spec.heads * spec.max_positions)
    logits_bytes = spec.vocab_size * (itemsize + 2 * FP32_BYTES)
    in_layer_bytes = TOKENS_AT_ONCE * (per_token + max(widest * itemsize, joined)) + scores
    behind_bytes = TOKENS_AT_ONCE * spec.hidden_size * itemsize + POSITIONS_AT_ONCE * logits_bytes
    return max(in_layer_bytes, behind_bytes) + rows * (logits_bytes + spec.max_positions * itemsize)


def _layer_width(spec: ArchSpec, number: int) -> int:
    """Numbers per token in a layer's feed-forward part, in all moe_experts that the token goes to."""
    layer = spec.layers[number]
    raised = 3 * layer.mlp_size
    if layer.moe is None:
        return raised
    routed = layer.moe.per_token * (3 * layer.moe.size + 2 * spec.hidden_size)
    return raised + routed + 2 * layer.moe.moe_experts


class _PackedTensors(Mapping[str, "Tensor"]):
    """Tensors, each read at its use. Raises as ``LlmBackend.pack``."""

    def __init__(self, expert: str, form: PlainForm, *sources: Checkpoint | StoredAdapter) -> None:
        self._expert = expert
        self._form = form
        self._sources = {name: source for source in sources for name in source.names}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, name: str) -> Tensor:
        stored = self._sources[name].read(name)
        if not is_finite(stored):
            raise WeightsCorrupt(self._expert, f"{name} holds NaN or infinity")
        return self._form.text_tensor(self._expert, name, stored)
