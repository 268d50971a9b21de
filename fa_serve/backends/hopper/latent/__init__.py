"""Decoding of latent attention (MLA) on Hopper. Left out: few query heads, which portable kernels serve."""
