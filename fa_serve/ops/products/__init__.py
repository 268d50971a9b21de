"""Products with weight matrices. Left out: the weights of experts (`fa_serve.ops.experts`)."""
