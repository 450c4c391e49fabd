"""State machine of all decisions: Engine.handle(event, now) -> effects. Pure: no torch, thread, clock, file or log."""
