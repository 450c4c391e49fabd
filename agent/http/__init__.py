"""HTTP/1 server for callers on this machine: connections with bounds on bytes, time and number."""
