"""The forward kernel for Hopper: its warps, tiles and launches. Left out: keys cut into splits (`split_kv`)."""
