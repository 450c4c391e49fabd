"""`coserve plan`."""
