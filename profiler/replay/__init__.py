"""Plays a trace on the real agent."""
