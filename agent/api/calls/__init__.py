"""A call between the wire and the desk: asked, refused with its reason, cancelled, streamed."""
