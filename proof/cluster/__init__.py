"""coserve bench cluster: workers on three nodes of Ray, beside Ray Serve on the same nodes."""
