"""The sections of a line file, by subject: what each key means, and what it may be."""
