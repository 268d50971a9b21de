"""Encoders: models whose answer is a vector, a score or the probabilities of classes, computed on packed sequences.

    folder     what a folder asks for: its task, its modules after the transformer, its prompts and its limit
    tokens     texts and pairs of texts as token ids, with the tokenizer of the folder
    packed     the transformer and its head on sequences that are packed end to end
    modules    what follows the transformer: pooling, dense layers, normalisation
    load       all of these, loaded

Left out: which sequences are computed together (fa_serve.engine.pooling).
"""
