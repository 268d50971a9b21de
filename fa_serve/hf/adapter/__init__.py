"""Attention in models of transformers: registration, masks, and the translation of a layer's call. Left out: weights."""
