"""The inference worker with its engine, the gateway, and the node supervisor.

Imports ``kvsidecar`` (stubs, formats, KV transfer) and ``kvkernels``. No module imports ``cache_daemon``: the
supervisor runs the daemon as a separate process, and reads its settings through ``kvsidecar.cli.exec_service``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference_svc.server.python_api import Chunk, Engine, Result

__all__ = ["Chunk", "Engine", "Result"]


def __getattr__(name: str) -> Any:
    # Lazily: the gateway and the supervisor do not need torch.
    if name in __all__:
        from kvsidecar.extras import missing_packages

        if missing := missing_packages("worker"):
            raise ImportError(
                f"inference_svc.{name} needs {', '.join(missing)}: pip install 'kvsidecar[worker]'", name=missing[0]
            )
        from inference_svc.server import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module 'inference_svc' has no attribute {name!r}")
