"""From Dynamo's graph to a step: partition, pipeline, reports, diagnostics."""
