"""HTTP for this machine, within bounds: connections, and what is served over them by whom."""
