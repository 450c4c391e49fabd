"""Texts beside one another: which tokens run in an iteration, where their keys and values lie, what is written."""
