"""Latent attention (MLA) over pages in portable Triton. Left out: values that lie apart from keys (`decode`, `prefill`)."""
