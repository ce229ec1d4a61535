"""The engine: rows, pool, attention, scheduler, sampling. Knows nothing of gRPC; ``cache`` is its only neighbour."""
