"""The line over HTTP, for this machine: its metrics as Prometheus reads them, and whether it lives and takes work."""
