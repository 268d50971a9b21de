"""Layers that few kernels compute: found by their structure, proven, and fused. Left out: attention itself."""
