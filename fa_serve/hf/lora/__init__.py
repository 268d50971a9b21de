"""Low-rank adapters of a model: read as peft writes them, and added to the products of its layers.

    adapter = read_adapter("adapters/french")            # format.py: strict; a ParameterError says what is wrong
    memory = LoraMemory(model, budget=1 << 30, max_rank=64, max_pages=4096)  # memory.py: finds all products, allocates memory
    packed = memory.pack(adapter)                        # on the host: checks the shapes
    memory.write(packed, slot, pages)

    format.py      peft's adapter_config.json and adapter_model.safetensors
    product.py     a product of the model that adapters add to, and the step that says which token uses which adapter
    memory.py      finds the products, allocates the memory and fills it
    packed.py      an adapter on the host, by product
    staging.py     pinned memory through which adapters are copied to the GPU, which lays them out
    host_runs.py   matrices that follow each other in memory, such as those of a file
    outer.py       adapters of the embedding and the head, which are not kept in pages
    parameters.py  adapters of experts and routers, which are not kept in pages either
    divided.py     the parts of adapters that a rank of a divided model keeps

A step without adapters runs the code of the base model. Left out: which adapters are in memory (fa_serve.engine.lora), and the
kernels (fa_serve.ops.lora).
"""
