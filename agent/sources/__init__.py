"""Sources of a line's subjects: the contract, the registry, and what a start finds in the journal."""
