"""A request from its prompt to its text: checks, parameters, outputs. Left out: when it is computed (`scheduler`)."""
