"""What a client may cost: connections, bodies, keys, turns. Left out: what an answer may cost (`answers.size`)."""
