"""Pictures that clients send: where their bytes come from, and how untrusted files are decoded safely.

addresses.py takes the bytes from a data URI, or names a host that the operator allows, from which fetching.py gets them.
decode_process.py decodes them and runs the model's processor, in a process that may die. kept_images.py keeps the processed
image for the next request with the same file. loader.py puts these together. Left out: what the processor makes of pixels, and
the prompt around it (fa_serve.engine.images).
"""
