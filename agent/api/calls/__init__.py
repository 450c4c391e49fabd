"""Calls between the wire and the desk: admitted, converted, refused, cancelled, streamed."""
