"""Low-rank adapters (LoRA) of products: the tokens of a step take different adapters, or none.

    y = ops.linear(x, weight)
    ops.add_lora(y, x, weights, batch)       # in place: the rows of tokens that have an adapter

    y = ops.linear_lora(x, weight, bias, weights, batch, activation="silu")            # with the product and what is behind it

    problem.py     the adapters of a product in memory, and which token of a step takes which
    kernel.py      two launches: x times A of each adapter (shrink), and that times B (expand)
    fallback.py    the same in PyTorch
    separate.py    a product, its adapters and what is behind it, one op after the other
    product.py     the adapters of few tokens in the launches of their product
    row_product.py the adapter of one token in the launch of its product, or A in one before it
    run.py         which of them computes a product

The tokens of a step are sorted by adapter on the host and cut into tiles of one adapter each, so that both kernels serve any
mixture of adapters and tokens without one, and a CUDA graph of them serves every step of its size. Products that are merged,
such as q, k and v, are the parts of one call. Source: LoRA (Hu et al. 2021, arXiv:2106.09685); many adapters in a batch are
from Punica (Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285), whose memory in pages of
ranks this is as well. Left out: where adapters come from (fa_serve.hf.lora) and which of them are in memory
(fa_serve.engine.lora).
"""
