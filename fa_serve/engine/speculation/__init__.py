"""Drafts of the next tokens, and what makes them. Left out: their verification, which is a step like any other."""
