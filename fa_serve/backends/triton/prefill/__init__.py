"""Prompts in portable Triton: the FlashAttention-2 forward pass. Left out: few queries against many keys (`decode`)."""
