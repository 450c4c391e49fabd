"""Cameras: each in a separate process, free-running or triggered, reconnected after each loss."""
