"""Prometheus metrics and health over HTTP."""
