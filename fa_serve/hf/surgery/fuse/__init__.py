"""Decoder layers computed by few kernels: found by structure, proven, and fused. Left out: attention itself."""
