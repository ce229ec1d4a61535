"""Models: which are supported, how they are loaded, what identifies them, and how they run on a CPU."""
