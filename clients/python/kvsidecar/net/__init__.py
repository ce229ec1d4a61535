"""gRPC channels and servers, and the addresses that they use."""
