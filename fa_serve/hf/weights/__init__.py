"""How checkpoints keep weights: formats, quantisation plans, files. Left out: modules (`fa_serve.hf.surgery`)."""
