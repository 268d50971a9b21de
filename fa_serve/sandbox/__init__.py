"""Runs work on what a client has sent, in a process that can be limited and killed. Left out: what the work is."""
