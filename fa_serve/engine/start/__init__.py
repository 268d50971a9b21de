"""The start of an engine: loading, warming up, reading ahead. Left out: the process that it happens in (`process`)."""
