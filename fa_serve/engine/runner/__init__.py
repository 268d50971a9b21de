"""A step on the device: arrays, graphs, the forward, sampling. Left out: what a step contains (`scheduler`)."""
