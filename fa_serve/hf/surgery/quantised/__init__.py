"""Modules with quantised weights. Left out: how a checkpoint keeps them (`fa_serve.hf.weights`)."""
