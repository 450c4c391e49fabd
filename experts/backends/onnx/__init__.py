"""ONNX graphs: users' graphs, and graphs that ONNX Runtime executes in place of a module."""
