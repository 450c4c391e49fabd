"""`coserve bench`, as far as it needs this floor: the commands beside a line and its trace."""
