"""The KV cache: pages and their owners, cached prefixes, tables and tensors. Left out: who gets pages (`scheduler`)."""
