"""The HTTP service: OpenAI's API over an `fa_serve.engine.AsyncEngine`. It is installed as `fa_serve.server`.

    app = create_app(AsyncEngine(config), Settings())        # from fa_serve.server.app and fa_serve.server.settings

From the connection to the engine, a request passes through these modules:

    process.py            the uvicorn process and its signals
    bounds/               limits on what a client may cost: connections (acceptor, protocol), the middleware for hosts, keys
                          and bodies (guard), the JSON of a body (json_bounds), and the client that a request counts for
                          (isolation)
    app.py                the application: middleware, routes and lifespan
    routes.py             the endpoints, each a few lines long
    schemas.py, strict.py the requests as strict pydantic models
    chat/, dialects/      what only chats need; the Responses and Messages APIs, whose requests are translated into chats
    answers/              one request's answer: its parameters, its sequences, its text, plain or streamed
    tokenization.py       prompts and conversations as token ids
    replies.py            the replies as typed dictionaries

What the requests share:

    service.py            readiness, the number of sequences in flight, the model card
    settings.py           the table of settings: flags, environment variables, and keys of a TOML or YAML file
    errors.py             every error that a client can see
    observe/              metrics, logs, traces, the timelines of slow requests, the startup report
    ray/                  the same service over several engines
    browser/              the playground at /, and the API reference at /docs

Tensors and scheduling belong to the engine. The commands that talk to a server are in `fa_serve.client`.
"""
