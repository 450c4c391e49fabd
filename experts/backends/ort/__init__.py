"""ONNX Runtime as a form of torch's architectures: exported graphs, weights lifted out, and sessions."""
