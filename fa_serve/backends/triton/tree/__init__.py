"""Attention over a fixed tree of keys: a query's bits do not depend on the other queries. Left out: faster orders of sums."""
