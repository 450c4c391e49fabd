"""What multiplies quantised matrices and attends: compiled when CoServe is installed, or torch's for four bits."""
