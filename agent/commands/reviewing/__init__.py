"""People's reviews as data for training: crops with labels, boxes, anomaly maps."""
