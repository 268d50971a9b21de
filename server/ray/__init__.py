"""Several engines behind one server: each engine is a replica of a Ray Serve deployment. Needs the extra `ray`.

    cluster = Cluster(ReplicaOptions(replicas=2))
    app = create_app(ReplicatedEngine(config, cluster), Settings())

The process that speaks HTTP is the same as that of `fa-serve serve`: connections, keys, limits, templates, tokens, streams and
errors are not written a second time. Only `AsyncEngine.generate` leaves it: a request's token ids go to one replica, and the
outputs of each of its steps come back together. Ray Serve starts, watches, replaces, adds and removes replicas.

    cluster.py            the connection to a Ray cluster, and the deployment in it
    replicated_engine.py  the `AsyncEngine` whose worker is a deployment
    engine_replica.py     what runs in a replica: an `AsyncEngine`
    output_channel.py     what the requests of one process have gained in a replica
    prefix_router.py      which replica gets a request; prefix_table.py remembers which one has seen its prompt
    replica_load.py       how full a replica is, and how many replicas that asks for

Ray's own HTTP proxy is not used. It would buffer what a client does not read, and it has none of the bounds of
server/bounds/protocol.py. Other processes that speak HTTP for the same replicas, also on other machines, are further `fa-serve
ray`.
"""
