"""Good and bad samples of an anomaly expert: scores, and a chart of the effect of each threshold."""
