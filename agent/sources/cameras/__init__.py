"""Cameras: each in a process of its own, free-running or triggered, connected anew whenever it is lost."""
