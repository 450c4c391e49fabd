"""Places on the disks of the box: which filesystem holds them, whether a share is away, SQLite files there."""
