"""Torch modules of all backends: built without weights, folded, bound to bytes, weighed."""
