"""What makes trouble: a fuzzer of all calls, clients that misbehave, small file systems. For tests and ``faults``."""
