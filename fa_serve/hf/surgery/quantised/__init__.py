"""Modules with quantised weights. Left out: how a checkpoint stores the weights (`fa_serve.hf.weights`)."""
