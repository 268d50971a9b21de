"""Everything that replaces modules of a loaded model. Left out: how weights are read (`fa_serve.hf.weights`)."""
