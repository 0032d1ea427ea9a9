"""Store state in fewer bytes: packed at rest, unpacked only within a step's kernel."""
