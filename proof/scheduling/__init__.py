"""Cost of scheduling: a run against the same batches and loads decided beforehand."""
