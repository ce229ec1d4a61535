"""First contact with a GPU: builds, checks and measures all that uses one; ``make gpu``.

Each step is a child process (``step_child``) that appends rows to a file; the runner may end it at any time. Imports
nothing at the top but the standard library, so that missing modules are named before anything needs them.
"""
