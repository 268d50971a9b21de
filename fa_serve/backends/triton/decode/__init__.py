"""Few queries against many keys in portable Triton: split-KV decoding. Left out: prompts (`prefill`)."""
