"""Which tokens the next step computes: queues, sequences, deadlines. Left out: pages (`cache`) and tensors (`runner`)."""
