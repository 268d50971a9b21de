"""How a kernel is launched: plans, compilers, and launches without Triton's JIT. Left out: the kernels themselves."""
