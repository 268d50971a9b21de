"""Experts of mixtures, computed by `fa_serve.ops.experts`. Left out: quantised weights (`quantised`)."""
