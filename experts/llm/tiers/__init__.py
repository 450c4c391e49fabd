"""Models larger than their memory: residency, prefetch and execution of their moe_experts."""
