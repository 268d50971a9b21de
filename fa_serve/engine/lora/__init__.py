"""Adapters (LoRA) in the engine: by name, in a pool on the device with a bound of bytes, with a tier on the host behind it.

    pool.py        which adapters have memory on the device. Plain Python, no torch
    store.py       names, the tier on the host, and the thread that loads

A sequence whose adapter is not in memory waits outside of the queue (engine/scheduler/adapter_seats.py), and no other sequence
waits for it. Left out: how adapters are read and where their memory is (fa_serve.hf.lora).
"""
