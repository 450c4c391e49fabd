"""`coserve bench`: everything measured on this box, and the report."""
