"""Workers as actors of a Ray cluster, and archives judged by them; the only importer of Ray."""
