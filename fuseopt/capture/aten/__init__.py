"""What each ATen call of a step becomes: buffers, values, nodes, externs."""
