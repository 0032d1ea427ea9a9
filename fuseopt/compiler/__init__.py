"""From Dynamo's graph to a step: partition, plan, reports, diagnostics."""
