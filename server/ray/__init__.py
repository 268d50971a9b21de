"""Several engines behind one server: each engine is a replica of a Ray Serve deployment. Needs the extra `ray`.

    cluster = Cluster(ReplicaOptions(replicas=2))
    app = create_app(ReplicatedEngine(config, cluster), Settings())

The process that speaks HTTP runs the same code as `fa-serve serve` for connections, keys, limits, templates, tokens, streams
and errors. Only the engine's work happens elsewhere: a request's token ids go to one replica, and the outputs of each of the
replica's steps come back together. Ray Serve starts, watches, replaces, adds and removes replicas.

    cluster.py            the connection to a Ray cluster, and the deployment in it
    replicated_engine.py  the `AsyncEngine` whose worker is a deployment
    engine_replica.py     what runs in a replica: an `AsyncEngine`
    output_channel.py     the outputs in one replica for the requests of one HTTP process
    prefix_router.py      chooses the replica for a request; prefix_table.py remembers which replicas have seen a prompt
    replica_load.py       the load of a replica, and the number of replicas that the loads call for

Ray's own HTTP proxy is not used. It would buffer what a client does not read, and it has none of the bounds of
server/bounds/protocol.py. To have more processes that speak HTTP for the same replicas, also on other machines, run `fa-serve
ray` again.
"""
