"""Low-rank adapters (LoRA) of products: the tokens of a step take different adapters, or none.

    y = ops.linear(x, weight)
    ops.add_lora(y, x, weights, batch)       # in place, only the rows of tokens that have an adapter

    y = ops.linear_lora(x, weight, bias, weights, batch, activation="silu")            # product, adapters and gate in one op

    problem.py     the adapters of a product in memory, and which token of a step takes which adapter
    kernel.py      two launches: x times A of each adapter (shrink), and that times B (expand)
    fallback.py    the same in PyTorch
    separate.py    the product, then its adapters, then the gate or the residual sum, one op after the other
    product.py     few tokens: the launches of the product compute its adapters as well
    row_product.py one token: the launch of the product computes its adapter as well, or all of it except A
    run.py         which of these computes a product

The host sorts the tokens of a step by adapter and cuts them into tiles of one adapter each. So both kernels serve any mixture
of adapters, including tokens without an adapter, and a CUDA graph of them serves every step of its size. Merged products, such
as q, k and v, are the parts of one call. Sources: LoRA (Hu et al. 2021, arXiv:2106.09685); many adapters in one batch: Punica
(Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285), which is also the source of the memory in
pages of ranks. Left out: where adapters come from (fa_serve.hf.lora) and which of them are in memory (fa_serve.engine.lora).
"""
