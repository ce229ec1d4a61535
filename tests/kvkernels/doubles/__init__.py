"""Test doubles of a GPU: a driver that refuses and delays, and pinned memory that a device writes."""
