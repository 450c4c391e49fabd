"""Search of the memory split and the number of executors (CoServe, section 4.4)."""
