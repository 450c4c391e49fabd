"""Good and bad samples of an anomaly expert: scored, and what each threshold would do to them, drawn."""
