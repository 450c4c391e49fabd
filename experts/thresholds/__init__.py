"""Thresholds of anomaly experts: scores of images, and the score from which an image is anomalous."""
