"""The memory split and the number of executors, searched (CoServe, section 4.4)."""
