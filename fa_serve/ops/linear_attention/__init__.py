"""Linear attention and short convolutions: layers whose past is a state of constant size instead of keys and values.

problem.py    what a layer keeps (states, tails) and what a step of the engine reads of them
api.py        the public functions, which `fa_serve.ops` exports
fallback.py   PyTorch, on any device
"""
