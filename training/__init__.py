"""Training of the demo model that ships in ``inference_svc/demo_model``.

``python -m training.train --help`` is the entry point. Nothing in the serving packages imports this one;
``benchmarks.quality`` uses its tasks.
"""
