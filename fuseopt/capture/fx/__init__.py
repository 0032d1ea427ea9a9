"""Dynamo's graph, read: its patterns, its loops, its inputs."""
