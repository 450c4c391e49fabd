"""The line over HTTP, for this machine: metrics for Prometheus, and health."""
