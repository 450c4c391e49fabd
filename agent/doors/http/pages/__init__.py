"""The station's pages: static files that ask `/api`."""
