"""Norms, activations, additions and rotary embeddings. Left out: what is fused into a product."""
