"""Block-sparse attention in portable Triton. Left out: how lists of blocks are made (`fa_serve.block_lists`)."""
