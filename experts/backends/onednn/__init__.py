"""Torch's architectures run by oneDNN: operators fused, weights packed in the layout that this CPU convolves from."""
