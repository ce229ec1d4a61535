"""Other engines for benchmarks: each in its own process and environment, over a socket.

``engine`` is the parent's end and ``wire`` the child's; ``vllm``, ``llama_cpp`` and ``transformers`` are programs that
run in the environments of those engines, and import nothing of ours but ``wire``.
"""
