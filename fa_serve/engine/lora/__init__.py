"""LoRA adapters in the engine: by name, in a pool of device memory with a bound of bytes, backed by a tier in host memory.

    pool.py        which adapters have memory on the device. Plain Python, no torch
    store.py       names, the tier on the host, and the thread that loads

A sequence whose adapter is not in device memory waits outside of the queue (engine/scheduler/adapter_seats.py), and holds up no
other sequence. Left out: how adapters are read and where their memory is (fa_serve.hf.lora).
"""
