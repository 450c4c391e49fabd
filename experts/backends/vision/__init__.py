"""Experts for images in torch: classifiers and detectors, scaled pixels, boxes."""
