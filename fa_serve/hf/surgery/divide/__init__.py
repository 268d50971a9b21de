"""Divides weights between ranks: the plan, the division, and its proof. Left out: sums over ranks (`fa_serve.ops`)."""
