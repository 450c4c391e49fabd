"""`coserve bench`: measurements on this box, and the report."""
