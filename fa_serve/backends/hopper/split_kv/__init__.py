"""Keys that several tiles of the forward kernel for Hopper share: the cuts, their schedule, and the sum of their results."""
