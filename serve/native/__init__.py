"""The compiled runner of a CPU: one call a step, weights packed as fp32, bf16 or int8."""
