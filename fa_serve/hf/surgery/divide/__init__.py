"""Weights divided between ranks: the plan, and the division that is proven. Left out: sums over ranks (`fa_serve.ops`)."""
