"""Attention by a fixed tree of the keys, whose bits do not depend on the other queries. Left out: the fastest order of sums."""
