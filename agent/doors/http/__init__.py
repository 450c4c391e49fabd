"""HTTP: one door for texts, the Open Inference Protocol, the station and its pages, metrics and health."""
