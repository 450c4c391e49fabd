"""How weights lie on disk, packed once, and how they are read from there straight into a buffer."""
