"""Models larger than their memory: which of their experts lie where, what is fetched ahead, and how they run so."""
