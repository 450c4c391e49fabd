"""Texts of callers: admitted, routed, written piece by piece."""
