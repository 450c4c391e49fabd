"""`coserve profile`."""
