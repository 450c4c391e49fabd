"""A model in eight bits as ONNX Runtime's users have it: quantised by its own tools, which are no code of ours.

That is static quantisation as ONNX Runtime advises it for x86 processors: after its own preparation of the graph, as
pairs of operators that bring values to levels and back (QDQ), values in uint8 by the least and greatest that were seen
of them, weights in int8 with a scale for each output channel.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from experts.backends.onnx.export import IMAGES
from experts.backends.onnx.session import REFUSALS
from experts.errors import BackendUnavailable
from proof.compute.contestants import CALIBRATED_ON, prepared_images

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from experts.backends.base import Prepared
    from proof.compute.contestants import Model

FAILURES = (*REFUSALS, LookupError, RuntimeError, TypeError, ValueError)  # its tools say nowhere what they raise


def quantised(model: Model, directory: Path) -> bytes:
    """The model's graph in eight bits, calibrated on images like those it is timed on. ``directory``: left as it was.

    Raises BackendUnavailable where ONNX Runtime cannot quantise it, OSError for what the disk refuses.
    """
    with TemporaryDirectory(prefix="quantised-", dir=directory) as name:
        given, ready, made = (Path(name) / f"{each}.onnx" for each in ("given", "ready", "made"))
        given.write_bytes(model.graph)
        try:
            quant_pre_process(
                str(given), str(ready), skip_symbolic_shape=True
            )  # all shapes but the number of images are known
            quantize_static(
                ready,
                made,
                _Images(prepared_images(model.expert, CALIBRATED_ON)),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        except FAILURES as error:
            raise BackendUnavailable("onnxruntime in eight bits", f"its tools do not quantise this: {error}") from error
        return made.read_bytes()


class _Images(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime is not followed by mypy here
    def __init__(self, images: Iterable[Prepared]) -> None:
        self._left = iter(images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self._left, None)
        return None if image is None else {IMAGES: image.tensor[None].numpy()}
