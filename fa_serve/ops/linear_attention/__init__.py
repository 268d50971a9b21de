"""Linear attention and short convolutions: layers whose past is a state of constant size instead of keys and values.

problem.py      what a layer keeps (states, tails), what a step of the engine reads of them, and the inputs of recurrences
api.py          the public functions, which `fa_serve.ops` exports
table.py        the kernels and which of them computes a call; tiles.py has their tiles, run.py launches them
few_rows.py     up to 16 rows behind a state page and a tail, of states that are matrices
pieces.py       chunks of prompts, of states that are matrices; prepare.py has what does not need a state, and
                pieces_backward.py the gradients of the delta rule
                channel_gradients.py those of gates by channel
listing.py      the sequences and pieces of a call of the functional form
scans.py        states that are vectors
convolution.py  short convolutions; convolution_backward.py has their gradients
fallback.py     PyTorch, on any device; recurrences.py has its arithmetic, rows.py the sequences of a call or step
"""
