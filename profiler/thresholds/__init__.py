"""The thresholds of anomaly experts: learned on good and bad samples, at a chosen rate of false alarms."""
