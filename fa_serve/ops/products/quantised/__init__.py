"""Products with quantised weights: the layout of a weight, its kernels and their tiles. Left out: the choice of the kernel
(table.py)."""
