"""Language models over ranks of torch.distributed: what each rank holds, and how tokens reach their moe_experts."""
