"""Compiled parts of language models, and their calls."""
