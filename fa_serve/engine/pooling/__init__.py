"""Encoders in the engine: requests that end with their prompt, and are answered with a vector, a score or classes.

    from fa_serve.engine import Encoder, EngineConfig

    encoder = Encoder(EngineConfig(model="BAAI/bge-small-en-v1.5"))
    vectors = encoder.encode(["a text", "another one"])         # (2, 384), float32

    params     what a request asks for, and what a loaded encoder is
    inputs     texts, pairs of texts and token ids become checked token ids
    reading    tokenizes the inputs of a call ahead of the batches
    batches    which inputs are computed together: by tokens, with clients that take turns
    pipeline   computes the results of a batch
    graphs     CUDA graphs of small batches
    encoder    `Encoder`, which has the methods of `Engine` that a worker calls

Left out: the model and its modules (fa_serve.hf.encoders), HTTP (fa_serve.server.pooling).
"""
