"""Read Dynamo's graph: its patterns, its loops, its inputs."""
