"""State in fewer bytes: packed at rest, unpacked and packed again in a step's kernel."""
