"""Faults of the agent: its errors, the pauses before a new try, and duties by time that outlive a failure."""
