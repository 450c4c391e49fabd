"""From a request to its verdict on the disk, and to its board's."""
