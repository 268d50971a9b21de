"""Products with weight matrices: what is asked (problem), the table of kernels (table), and how one is launched (run).

Left out: the weights of experts (`fa_serve.ops.moe`), which the same table decides about.
"""
