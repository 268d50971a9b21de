"""Low-rank adapters of a model: read as peft writes them, and added to the products of its layers.

    adapter = read_adapter("adapters/french")            # format.py: strictly, or a ParameterError says what is wrong
    memory = LoraMemory(model, budget=1 << 30, max_rank=64)      # memory.py: all products of the model, and room for adapters
    packed = memory.pack(adapter)                        # checks the shapes; on the host
    memory.write(packed, slot, pages)

    format.py      peft's adapter_config.json and adapter_model.safetensors
    product.py     a product of the model that adapters add to, and the step that says which token takes which
    memory.py      finds the products, makes the memory and fills it
    packed.py      an adapter on the host, by product
    staging.py     pinned memory through which it is copied
    outer.py       adapters of the embedding and the head, which have no place in the pages
    parameters.py  the same of experts and routers

A step without adapters runs the code of the base. Left out: which adapters are in memory (fa_serve.engine.lora), and the
kernels (fa_serve.ops.lora).
"""
