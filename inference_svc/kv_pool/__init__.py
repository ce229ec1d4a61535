"""The paged KV pool: allocation, block tables, prefix cache, sliding-window release, disk overflow."""
