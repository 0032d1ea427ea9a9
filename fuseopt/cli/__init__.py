"""Command line: check the installation, plan a step, verify it, list the cache."""
