"""Measurements of times, footprints and workspaces over the agent's own path."""
