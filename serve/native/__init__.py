"""The compiled runner of a CPU: whole waves in a few calls, weights packed as fp32, bf16 or int8."""
