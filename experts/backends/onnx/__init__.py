"""ONNX graphs: those that an owner brings, and those that ONNX Runtime executes in the place of a module."""
