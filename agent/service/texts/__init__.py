"""Texts of callers: admitted, routed, streamed."""
