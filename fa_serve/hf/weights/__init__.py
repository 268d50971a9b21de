"""How checkpoints keep weights: formats, plans of quantisation, files. Left out: modules (`fa_serve.hf.surgery`)."""
