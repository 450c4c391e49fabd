"""A file in an inbox: its name, its sidecar, whether it is complete, its way through the folders."""
