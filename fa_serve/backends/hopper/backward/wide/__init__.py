"""Gradients of heads of 136 to 256 on Hopper: one warpgroup of scores and dV, one of dS and dK. See `kernel`."""
