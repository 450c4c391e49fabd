"""Files of an inbox: names, sidecars, completeness, moves between folders."""
