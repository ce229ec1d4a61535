"""The command line. Commands that start a server import it only when they run."""
