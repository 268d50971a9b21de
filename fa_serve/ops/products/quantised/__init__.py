"""Products with quantised weights: the layout of a weight, its kernels, and which of them serves."""
