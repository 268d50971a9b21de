"""Where an engine runs: a thread or a process, its commands, and the asyncio side. Left out: the step (`engine`)."""
