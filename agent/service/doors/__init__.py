"""Where requests enter the line and answers leave it: folders, cameras, callers, and what is not let in."""
