"""Concurrent texts: tokens of each iteration, memory of keys and values, sampling."""
