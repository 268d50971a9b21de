"""The backward kernel for Hopper: its warps, tiles and the accumulator of dQ. Left out: masks, and heads above 128 (`wide`)."""
