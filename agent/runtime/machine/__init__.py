"""The box: processors, memories, and bytes allocated from them."""
