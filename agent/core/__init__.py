"""Decides. Pure: no torch, thread, clock, file or log. One state machine: Engine.handle(event, now) -> effects."""
