"""Linear layers of CPU models, by weight format."""
