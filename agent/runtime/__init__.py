"""Does: carries out the Engine's effects with threads, transfers and devices, and answers with events."""
