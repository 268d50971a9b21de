"""Products with weight matrices: their description (problem), the table of kernels (table), and how one is launched (run).

Left out: products with the weights of experts (`fa_serve.ops.moe`), whose kernels are chosen from the same table.
"""
