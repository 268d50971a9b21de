"""The ranks of tensor parallelism and their links. Left out: sums over ranks (`fa_serve.ops.collectives`)."""
