"""The FlashAttention-2 backward pass in portable Triton. Left out: paged calls, which have no gradients."""
