"""Answers to requests: prompts, sequences, chunks and replies. Left out: chat (`chat`) and other APIs (`dialects`)."""
