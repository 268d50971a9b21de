"""Structured output: grammars, their compilation and the masks of a step. Left out: which schema a request asks for."""
