"""Images in requests: what a prompt says about them, the cache of their embeddings, and the processor that reads files."""
