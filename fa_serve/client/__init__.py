"""Clients of the HTTP server: `fa-serve bench` and `fa-serve chat`. They speak OpenAI's API and work with other servers too.

    bench.py            a load, offered by one or several processes
    http_connection.py  the connection that bench uses, which does as little as possible for each event
    bench_report.py     percentiles and throughput, and their table
    chat.py             a conversation in the terminal

Nothing here imports the engine, the server or torch.
"""
