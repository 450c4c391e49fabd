"""Sources of a line's subjects: the contract, the registry, and unfinished images of the journal."""
