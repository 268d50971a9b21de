"""Tokens from logits: the kernel, and the same in plain PyTorch. Left out: penalties and masks (the engine)."""
