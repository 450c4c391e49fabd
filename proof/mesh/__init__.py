"""coserve bench mesh: figures 10 to 13 of DeepSpeed-MoE, on a simulated mesh of GPUs."""
