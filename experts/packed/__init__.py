"""Weights on disk, packed once, and their reading straight into a buffer."""
