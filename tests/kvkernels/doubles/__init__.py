"""Test doubles of a GPU: a driver that refuses and delays calls, and pinned memory that a device writes."""
