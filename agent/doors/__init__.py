"""Callers of a running line: what both wires share, then the wires themselves, gRPC and HTTP."""
