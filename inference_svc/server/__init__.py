"""Worker process: gRPC services, runtime, settings, metrics, adapter administration.

The composition root: it imports all other packages of the worker; only ``node``, ``__main__`` and tests import it.
``worker_config``, ``preflight`` and ``daemon_address`` import no torch.
"""
