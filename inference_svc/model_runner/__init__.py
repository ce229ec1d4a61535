"""The forward pass: batches, attention backends, fused layers, CPU and CUDA graphs."""
