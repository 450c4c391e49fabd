"""Students of a language model: staged soft labels beside soft labels to the end, and beside none."""
