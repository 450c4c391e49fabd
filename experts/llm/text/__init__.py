"""Tokenizers, chat templates, and text that grows token by token until it ends."""
