"""Routes of encoders: embeddings, reranking, scores and classes, in the forms of OpenAI, Cohere and Jina, vLLM and TEI.

    requests   the bodies, as strict pydantic models
    replies    the replies, as typed dictionaries
    answer     one request: turns its inputs into token ids, and gets their results or errors from the engine
    reading    tokenizes the inputs of several requests at once
    vectors    vectors as JSON
    routes     the endpoints

Their requests go through the same middleware, turns, bounds and queue as those for generation. Left out: the encoder itself
(fa_serve.engine.pooling).
"""
