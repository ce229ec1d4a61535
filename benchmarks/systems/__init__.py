"""Other engines for benchmarks, each in its own process and Python environment, over a socket.

``engine`` is the parent's end of the socket, and ``wire`` is the child's. ``vllm``, ``llama_cpp`` and ``transformers``
are programs that run in the environments of these engines; of our code, they import only ``wire``.
"""
