"""The thresholds of anomaly experts: what one measures of images, and from which score on an image is anomalous."""
