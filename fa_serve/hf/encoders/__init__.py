"""Encoders: models whose answer is a vector, a score or the probabilities of classes, computed on packed sequences.

    folder     what a folder asks for: its task, its modules after the transformer, its prompts and its limit
    packed     the transformer and its head on sequences that are packed end to end
    modules    what follows the transformer: pooling, dense layers, normalisation
    load       loads all of these
    facts      describes an encoder without its weights, for `fa-serve info`

Left out: which sequences are computed together (fa_serve.engine.pooling).
"""
