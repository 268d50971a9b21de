"""Pictures that clients send: where their bytes come from, and how strangers' files become pixels without harm.

addresses.py finds the bytes, of a data URI or of a host that the operator allows (fetching.py). decode_process.py decodes them
and runs the model's processor, in a process that may die. kept_images.py keeps what came of a file, for the next request that
has it. loader.py puts these together. Left out: what the processor makes of pixels, and the prompt around it
(fa_serve.engine.images).
"""
