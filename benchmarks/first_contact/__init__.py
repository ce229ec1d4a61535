"""First contact with a GPU (``make gpu``): builds, checks and measures all code that uses one.

Each step is a child process (``step_child``) that appends rows to a file; the runner may kill the process at any time.
``__main__`` imports only the standard library at the top, so that it can report missing modules before a step needs
them.
"""
