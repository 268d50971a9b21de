"""Linear attention and short convolutions: layers whose past is a state of constant size instead of keys and values.

problem.py      what a layer keeps (states, tails), how a step of the engine refers to it, and the inputs of recurrences
api.py          the public functions, which `fa_serve.ops` exports
table.py        chooses the kernel that computes a call; tiles.py has the kernels' tiles, run.py launches them
few_rows.py     up to 16 rows after a state page and a tail, for states that are matrices; tails.py has its helpers
pieces.py       chunks of prompts, for states that are matrices; prepare.py computes what does not need a state,
                pieces_backward.py the gradients of the delta rule with gates by head, and
                channel_gradients.py those with gates by channel
listing.py      the sequences and pieces of a call of the functional form
scans.py        states that are vectors
convolution.py  short convolutions; convolution_backward.py has their gradients
fallback.py     PyTorch, on any device; recurrences.py has its arithmetic, rows.py the sequences of a call or step
"""
