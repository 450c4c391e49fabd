"""What callers ask of a running line: images judged, its status, why a verdict is as it is."""
