"""What backends of torch modules do alike: built without weights, folded, bound to bytes, weighed."""
