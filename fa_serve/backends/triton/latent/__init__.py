"""Latent attention (MLA) over pages in portable Triton. Left out: keys and values that lie apart (`decode`, `prefill`)."""
