"""Graphs that find bright pixels strange, and answer as anomaly models of several exporters do."""

from tests.experts.onnx_text import model_of

SIZE_PX = 32
KINDS = {  # how an output is made, its type and its shape
    "map": ("Identity(heat)", "float[{0},1,{1},{1}]"), "flat map": ("Squeeze(heat, channel)", "float[{0},{1},{1}]"),
    "score": ("Identity(top)", "float[{0}]"), "doubled": ("Add(top, top)", "float[{0}]"),
    "column": ("ReduceMax<axes=[2, 3], keepdims=0>(heat)", "float[{0},1]"), "bool": ("Greater(top, half)", "bool[{0}]"),
    "mask": ("Greater(heat, half)", "bool[{0},1,{1},{1}]"),
}  # fmt: skip


def brightness(*outputs, batch="n", size=SIZE_PX):
    """A graph that finds bright pixels strange: ``outputs`` are name -> kind."""
    made = "\n".join(f'"{name}" = {KINDS[kind][0]}' for name, kind in outputs)
    values = ", ".join(f'{KINDS[kind][1].format(batch, size)} "{name}"' for name, kind in outputs)
    return model_of(
        f"""brightness (float[{batch},3,{size},{size}] image) => ({values})
            <float half = {{0.5}}, int64[1] channel = {{1}}> {{
            heat = ReduceMax<axes=[1], keepdims=1>(image)
            top = ReduceMax<axes=[1, 2, 3], keepdims=0>(heat)
            {made}
        }}"""
    )
