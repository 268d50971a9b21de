"""Sums over the ranks of tensor parallelism. Left out: processes and links (`fa_serve.engine.parallel`)."""
