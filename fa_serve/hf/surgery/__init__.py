"""Everything that replaces a module of a model. Left out: how weights are read (`fa_serve.hf.weights`)."""
